"""What `brigade status` shows, and which answers it takes for those of a server."""

import pytest

from coordinator.cli.status import tables
from coordinator.cluster.tables import plain_console
from worker.platform.text import Json

FOUND: Json = {
    "standing": {"state": "ready", "why": ""},
    "nodes": [
        {"name": name, "state": "active", "start": 0, "end": 12, "utilisation": 0.5, "weight_bytes": 123 << 30,
         "cache_held_bytes": 456 << 20, "peak_memory_bytes": 789 << 20, "memory_bytes": 321 << 30}
        for name in ("coordinator", "mac-studio-of-anna")
    ],
    "hops": [{"source": "coordinator", "target": "mini", "latency_ms": 1.5, "sent_bytes": 654 << 20}],
    "requests": [
        {"id": "chatcmpl-abcdefghijkl", "prompt_tokens": 12345, "generated": 678, "decoder": "lookahead", "age_s": 90.0,
         "state": "running"}
    ] * 9,
}  # fmt: skip


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_no_name_and_no_figure_is_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plain_console().print(tables(FOUND, width))
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= width
    for cell in (
        "coordinator ", "mac-studio-of-anna ", "[0,12)", "123.0 G", "456.0 M", "789.0 M", "50%", "active", "321.0 G",
        "coordinator → mini", "1.50 ms", "654.0 M", "abcdefghijkl", "12345", "678", "lookahead", "90 s",
        "running", "and 1 more",
    ):  # fmt: skip
        assert cell in told
