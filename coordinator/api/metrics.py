"""`GET /metrics` for Prometheus: a server's statistics and its nodes' status, under vLLM's names if it has them."""

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from coordinator.api.server import Server
from coordinator.engine.engine import ServerState
from coordinator.engine.status import StatusSnapshot

_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(server: Server) -> Response:
    """All metrics, in Prometheus's text format."""
    text = metrics_text(server, await server.status.look(server.engine))
    return Response(text, media_type=_FORMAT)


def metrics_text(server: Server, now: StatusSnapshot) -> bytes:
    """Return all metrics, each labelled with the model's name."""
    return generate_latest(_Collector(server, now))


class _Collector(Collector):
    """The counters and histograms of the statistics, gauges of this moment, and the sums of each stage."""

    def __init__(self, server: Server, now: StatusSnapshot) -> None:
        self._server = server
        self._now = now

    def collect(self) -> Iterator[Metric]:
        name = self._server.names[0]
        for metric in [*self._gauges(), *self._server.stats.registry.collect(), *self._stages(), *self._workers()]:
            metric.samples = [
                sample._replace(labels={"model_name": name, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric

    def _gauges(self) -> Iterator[Metric]:
        states, state = [each.state for each in self._now.requests], self._server.state.word
        num_waiting = states.count("waiting") + self._server.num_waking
        for name, text, value in (
            ("num_requests_running", "Requests that have memory.", states.count("running")),
            ("num_requests_waiting", "Requests that wait for memory, or for the model to be loaded.", num_waiting),
            ("uptime_seconds", "Since the server began.", self._server.stats.uptime_s),
        ):
            yield GaugeMetricFamily(f"brigade_{name}", text, value)
        standing = GaugeMetricFamily("brigade_standing", "1 for the state of the server.", labels=("state",))
        for word in dict.fromkeys(each.word for each in ServerState):
            standing.add_metric((word,), int(word == state))
        yield standing

    def _stages(self) -> Iterator[Metric]:
        """Yield the sums of every stage and worker so far, lost ones included; their rates are shares of time."""
        for name, text, field, unit in (
            ("stage_compute_seconds", "At work on frames.", "compute", 1e9),
            ("stage_busy_seconds", "At work, no moment counted twice.", "busy", 1e9),
            ("stage_bubble_seconds", "Idle while a frame was on its way.", "bubble", 1e9),
            ("stage_queue_seconds", "Frames waiting for their turn.", "queue", 1e9),
            ("stage_wire_seconds", "Frames on the hop into the stage.", "wire", 1e9),
            ("stage_frames", "Frames.", "num_frames", 1),
        ):
            family = CounterMetricFamily(f"brigade_{name}", text, labels=("stage", "worker"))
            for each in self._server.stats.stages.totals:
                family.add_metric((str(each.stage), each.worker), getattr(each, field) / unit)
            yield family

    def _workers(self) -> Iterator[Metric]:
        nodes = [node for node in self._now.nodes if node.stage is not None]
        for name, text, values in (
            ("stage_utilisation", "Share of the last ten seconds at work.", [node.utilisation for node in nodes]),
            (
                "kv_cache_usage_perc",
                "Reserved share of the cache's memory, 0 to 1.",
                [node.cache_promised_bytes / max(1, node.cache_budget_bytes) for node in nodes],
            ),
            ("cache_promised_bytes", "Reserved for requests.", [node.cache_promised_bytes for node in nodes]),
            ("cache_budget_bytes", "That may be reserved.", [node.cache_budget_bytes for node in nodes]),
            ("cache_held_bytes", "Held by caches.", [node.cache_held_bytes for node in nodes]),
            ("weight_bytes", "Of the stage's layers.", [node.weight_bytes for node in nodes]),
            ("peak_memory_bytes", "The most since a request began.", [node.peak_memory_bytes for node in nodes]),
            ("active_memory_bytes", "Held by MLX.", [node.active_memory_bytes for node in nodes]),
            ("cached_memory_bytes", "Freed, and kept by MLX.", [node.cached_memory_bytes for node in nodes]),
            ("hop_sent_bytes", "To the next stage since it joined the chain.", [node.sent_bytes for node in nodes]),
        ):
            family = GaugeMetricFamily(f"brigade_{name}", text, labels=("stage", "worker"))
            for node, value in zip(nodes, values, strict=True):
                if value is not None:
                    family.add_metric((str(node.stage), node.name), value)
            yield family
        is_up = GaugeMetricFamily("brigade_worker_up", "Whether the node is there.", labels=("worker",))
        for node in self._now.nodes:
            is_up.add_metric((node.name,), int(node.state != "lost"))
        yield is_up
