"""The soak's judgement: what counts as more than at first, what is asked, and that a wrong token is told."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from coordinator.sessions.output import Answer, Token
from tools.soak import Round
from tools.soak_held import Held
from tools.soak_report import Soak
from tools.soak_requests import make_requests
from worker.errors import StageLost

FIRST = Held(100 * 2**20, 20, 10)
SPEC: Any = SimpleNamespace(vocab_size=50)


def judging() -> tuple[Round, Soak]:
    """A round that only judges answers."""
    nothing: Any = None
    soak = Soak("a machine", "demo", 0)
    return Round(nothing, nothing, SPEC, [], [], soak, nothing, nothing, lambda line: None), soak


def answer_of(tokens: list[int], finish_reason: str = "length") -> Answer:
    return Answer(samples=[Token(token) for token in tokens], finish_reason=finish_reason)


def test_what_a_process_may_hold_more_than_at_first() -> None:
    mib = 2**20
    held = [Held(160 * mib, 20, 12), Held(170 * mib, 20, 10), Held(90 * mib, 21, 10), Held(90 * mib, 19, 13)]
    assert [last.more_than(FIRST) for last in held] == ["", "70 MiB", "1 descriptors", "3 threads"]


def test_every_decoder_is_asked_in_every_way_for_short_long_and_common_prompts() -> None:
    asked = make_requests(SPEC)
    kinds = Counter((each.decode.kind, each.sampling.temperature) for each in asked)
    assert len(kinds) == 12 and set(kinds.values()) == {3}
    assert len({each.prompt[:100] for each in asked if len(each.prompt) == 105}) == 1
    assert asked == make_requests(SPEC)


def test_another_token_is_a_violation_and_an_early_leave_is_none() -> None:
    one, soak = judging()
    request = make_requests(SPEC)[0]
    one._compare(request, [1, 2, 3], answer_of([1, 2, 3]))
    one._compare(request, [1, 2, 3], answer_of([1, 2], finish_reason=""))
    assert (dict(soak.ends), soak.violations) == ({"equal": 1, "left by its reader": 1}, [])
    one._compare(request, [1, 2, 3], answer_of([1, 2, 4]))
    one._compare(request, [1, 2, 3], answer_of([1, 2]))
    one._compare(request, [1, 2, 3], answer_of([2], finish_reason=""))
    assert len(soak.violations) == 3


def test_an_error_is_a_violation_but_for_the_third_loss_without_a_token() -> None:
    one, soak = judging()
    request = make_requests(SPEC)[0]
    one._failed(request, StageLost("given up: the chain was lost 3 times without a token of it in between"))
    assert not soak.violations
    one._failed(request, StageLost("no chain could be opened within 60 s"))
    assert len(soak.violations) == 1
