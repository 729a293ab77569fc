"""How many bytes of a feed may be on their way: what the link takes in a tenth of a second, found in a few looks."""

from types import SimpleNamespace

import pytest

from coordinator.cluster import weights as feed_module
from coordinator.cluster.weights import Allowance
from worker.node.weights_receive import ACK_BYTES


def test_it_is_what_the_link_takes_in_a_tenth_of_a_second_and_never_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of less a sender would wait for a word that never comes; it follows a link that gets slower and quicker."""
    now = 100.0
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: now))

    def run(allowance: Allowance, bytes_per_s: float, for_s: float = 0.5) -> int:
        nonlocal now
        for _ in range(round(for_s / 0.005)):
            now += 0.005
            allowance.note(int(bytes_per_s * 0.005))
        return allowance.num_bytes

    for bytes_per_s, expected in ((2e6, ACK_BYTES), (30e6, 3e6), (125e6, 12.5e6), (2e9, 16 << 20)):
        assert run(Allowance(), bytes_per_s) == pytest.approx(expected, rel=0.02)
    allowance = Allowance()
    sizes = [run(allowance, speed) for speed in (125e6, 20e6, 125e6)]
    assert sizes == pytest.approx([12.5e6, 2e6, 12.5e6], rel=0.02)
    assert run(Allowance(), 1e3, 1.0) >= ACK_BYTES
