"""`GET /metrics` for Prometheus: the tally's numbers and the nodes' answers, under vLLM's names where it has them."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.served import Served
from coordinator.resident.model import State
from coordinator.resident.tally import Histogram, Tally
from coordinator.resident.watch import LOST, Now

_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    served: Served = request.app.state.served
    text = metrics_text(served, await served.watch.look(served.model))
    return Response(text, media_type=_FORMAT)


def metrics_text(served: Served, now: Now) -> bytes:
    """All metrics, from a registry of its own: the global one is the whole process's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(served, now))
    return generate_latest(registry)


class _Collector:
    """Makes metrics of plain numbers when they are asked for; nothing is counted here."""

    def __init__(self, served: Served, now: Now) -> None:
        self._served = served
        self._tally: Tally = served.tally
        self._now = now
        self._model = served.names[0]

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._stages()
        yield from self._workers()

    def _requests(self) -> Iterator[Metric]:
        tally, states = self._tally, [each.state for each in self._now.requests]
        yield self._gauge("num_requests_running", "Requests that have memory.", states.count("running"))
        yield self._gauge("num_requests_waiting", "Requests that wait for memory.", states.count("waiting"))
        yield self._gauge("uptime_seconds", "Since the server began.", tally.uptime_s)
        standing = self._served.standing.state.word
        is_now = {state.word: int(state.word == standing) for state in State}
        yield self._by("standing", "1 for how the model stands now.", "state", is_now, GaugeMetricFamily)
        yield self._counter("prompt_tokens", "Tokens of prompts whose answers began.", tally.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens of answers.", tally.generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in caches.", tally.prefix_queries)
        yield self._counter("prefix_cache_hits", "Of those, tokens found there.", tally.prefix_hits)
        yield self._by("request_success", "Requests that ended, by reason.", "finished_reason", tally.finished)
        yield self._by("requests_rejected", "Requests that were never run.", "reason", tally.refused)
        yield self._by("recoveries", "Lost chains that another one took over from.", "cause", tally.recoveries)
        yield self._by("decoder_tokens", "Tokens of answers that ended.", "decoder", tally.decoder_tokens)
        yield self._by("decoder_steps", "Steps that they took.", "decoder", tally.decoder_steps)
        for name, histogram in tally.histograms.items():
            yield self._histogram(name, histogram)

    def _stages(self) -> Iterator[Metric]:
        """Sums of every stage that a worker ever was; a rate of them is a share of time."""
        sums = self._tally.flow.stages
        for name, said, values in (
            ("stage_compute_seconds", "At work on frames.", [each.compute / 1e9 for each in sums]),
            ("stage_busy_seconds", "At work, no moment counted twice.", [each.busy / 1e9 for each in sums]),
            ("stage_bubble_seconds", "Idle while a frame was on its way.", [each.bubble / 1e9 for each in sums]),
            ("stage_queue_seconds", "Frames waiting for their turn.", [each.queue / 1e9 for each in sums]),
            ("stage_wire_seconds", "Frames on the hop into the stage.", [each.wire / 1e9 for each in sums]),
            ("stage_frames", "Frames.", [each.num_frames for each in sums]),
        ):
            family = CounterMetricFamily(f"brigade_{name}", said, labels=("model_name", "stage", "worker"))
            for each, value in zip(sums, values, strict=True):
                family.add_metric((self._model, str(each.stage), each.worker), value)
            yield family

    def _workers(self) -> Iterator[Metric]:
        nodes = [node for node in self._now.nodes if node.stage is not None]
        for name, said, values in (
            ("stage_utilisation", "Share of the last ten seconds at work.", [node.utilisation for node in nodes]),
            (
                "kv_cache_usage_perc",
                "Promised share of the cache's memory, 0 to 1.",
                [node.cache_promised_bytes / max(1, node.cache_budget_bytes) for node in nodes],
            ),
            ("cache_promised_bytes", "Promised to requests.", [node.cache_promised_bytes for node in nodes]),
            ("cache_budget_bytes", "That may be promised.", [node.cache_budget_bytes for node in nodes]),
            ("cache_held_bytes", "Held by caches.", [node.cache_held_bytes for node in nodes]),
            ("weight_bytes", "Of the stage's layers.", [node.weight_bytes for node in nodes]),
            ("peak_memory_bytes", "The most since a request began.", [node.peak_memory_bytes for node in nodes]),
            ("active_memory_bytes", "Held by MLX.", [node.active_memory_bytes for node in nodes]),
            ("cached_memory_bytes", "Freed, and kept by MLX.", [node.cached_memory_bytes for node in nodes]),
            ("hop_sent_bytes", "To the next stage since it joined the chain.", [node.sent_bytes for node in nodes]),
        ):
            family = GaugeMetricFamily(f"brigade_{name}", said, labels=("model_name", "stage", "worker"))
            for node, value in zip(nodes, values, strict=True):
                if value is not None:
                    family.add_metric((self._model, str(node.stage), node.name), value)
            yield family
        is_up = {node.name: int(node.state != LOST) for node in self._now.nodes}
        yield self._by("worker_up", "Whether the node is there.", "worker", is_up, GaugeMetricFamily)

    def _gauge(self, name: str, said: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"brigade_{name}", said, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, said: str, value: float) -> Metric:
        family = CounterMetricFamily(f"brigade_{name}", said, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _by(
        self,
        name: str,
        said: str,
        label: str,
        values: Mapping[str, int],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        family = kind(f"brigade_{name}", said, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"brigade_{name}", name.replace("_", " ").capitalize(), labels=("model_name",))
        bounds = [f"{bound:g}" for bound in histogram.bounds] + ["+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric((self._model,), buckets, sum_value=histogram.total)
        return family
