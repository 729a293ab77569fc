"""`--trace FILE`: a request's stages as Chrome trace events (chrome://tracing, Perfetto), one track per stage. Pure."""

from collections.abc import Sequence
from typing import Any

from coordinator.sessions.waterfall import Passage, spans


def trace_events(passages: Sequence[Passage], offsets: Sequence[int], nodes: Sequence[str]) -> dict[str, Any]:
    """The trace as the JSON object that viewers read; times in microseconds on the coordinator's clock."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}: {node}"}}
        for stage, node in enumerate(nodes)
    ]
    for number, passage in enumerate(passages):
        events += [
            {
                "ph": "X", "name": part, "cat": f"frame {number}", "pid": 0, "tid": stage,
                "ts": begin / 1e3, "dur": max(0, end - begin) / 1e3,
            }
            for part, stage, begin, end in spans(passage, offsets)
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
