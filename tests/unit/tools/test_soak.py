"""The soak's judgement: what counts as more than at first, what is asked, and that a wrong token is told."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from coordinator.sessions.output import Answer, Token
from tools.soak import Round, make_requests
from tools.soak_report import Held, Soak
from worker.errors import StageLost

SPEC: Any = SimpleNamespace(vocab_size=50)


def test_a_process_may_hold_a_little_more_than_at_first() -> None:
    mib = 2**20
    for held, more in (
        (Held(160 * mib, 20, 12), ""), (Held(170 * mib, 20, 10), "70 MiB"), (Held(90 * mib, 21, 10), "1 descriptors"),
        (Held(90 * mib, 19, 13), "3 threads"),
    ):  # fmt: skip
        assert held.more_than(Held(100 * mib, 20, 10)) == more


def test_every_decoder_is_asked_in_every_way_for_short_long_and_common_prompts() -> None:
    asked = make_requests(SPEC)
    kinds = Counter((each.decode.kind, each.sampling.temperature) for each in asked)
    assert len(kinds) == 12 and set(kinds.values()) == {3}
    assert len({each.prompt[:100] for each in asked if len(each.prompt) == 105}) == 1
    assert asked == make_requests(SPEC)


def test_another_token_or_an_error_is_a_violation_but_an_early_leave_or_the_third_loss_is_none() -> None:
    nothing: Any = None
    soak = Soak("a machine", "demo", 0)
    judging = Round(nothing, nothing, [], [], soak, nothing, nothing, lambda line: None)
    request = make_requests(SPEC)[0]

    def compare(tokens: list[int], finish_reason: str) -> None:
        answer = Answer(samples=[Token(token) for token in tokens], finish_reason=finish_reason)
        judging.compare(request, [1, 2, 3], answer)

    compare([1, 2, 3], "length")
    compare([1, 2], "")
    judging.fail(request, StageLost("given up: the chain was lost 3 times without a token of it in between"))
    assert soak.ends["equal"] == soak.ends["left by its reader"] == 1 and soak.violations == []
    compare([1, 2, 4], "length")
    compare([1, 2], "length")
    compare([2], "")
    judging.fail(request, StageLost("no chain could be opened within 60 s"))
    assert len(soak.violations) == 4
