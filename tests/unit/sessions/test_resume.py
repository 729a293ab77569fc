"""A session that goes on from what a journal has of it gives the rest of the very same answer."""

import random

import pytest

from coordinator.sessions.output import KnownTokens, Token
from tests.unit.fake_chain import Rig, decoders, prompt_of
from tests.unit.sessions.test_rewind import Asked


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("kind", decoders())
def test_an_answer_goes_on_from_any_step_by_its_tokens_and_fills_alone(kind: str, seed: int) -> None:
    request = Asked(prompt_of(11) * 3, 30, frozenset(), kind, seed)
    expected = request.undisturbed()
    rig = Rig(num_stages=2, chunk=16)
    rig.chain.is_lossy = True
    session = request.submit(rig)
    states = []
    while session.finish_reason is None:
        states.append(KnownTokens(tuple(map(Token, session.generated)), tuple(session.fills)))
        rig.step()
    assert session.generated == expected and len(states) > 1
    assert any(state.fills for state in states) == (kind == "diffusion-fast")
    for known in states:
        later = Rig(num_stages=2, chunk=16)
        later.chain.is_lossy = True
        resumed = request.build(later, known)
        later.scheduler.submit(resumed)
        later.run(resumed)
        assert (resumed.generated, resumed.num_prompt, resumed.finish_reason) == (expected, 33, "length")


def test_the_fills_of_a_session_are_in_the_order_of_their_positions_with_their_logprobs() -> None:
    token = Token(5, -0.5, (Token(5, -0.5), Token(6, -1.5)))
    assert Token.of(token.to_sample()) == token
    decoder = decoders()["diffusion-fast"]()
    places = random.Random(3).sample(range(20, 40), 9)
    decoder.restore([(at, Token(at).to_sample()) for at in places])
    assert [at for at, _ in decoder.fills] == sorted(places)
