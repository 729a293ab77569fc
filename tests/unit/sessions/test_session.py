"""One session: which windows it makes of a prompt and of what a decoder proposes, and when it ends."""

import pytest

from coordinator.decoding.decoders import Fill
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Frame, Opening, Sample, Window
from tests.unit.fake_chain import VOCAB, FakeChain, decoders, make_session, plain_answer, prompt_of
from worker.compute.executor import num_rows


def fill(window: int = 16) -> Fill:
    return Fill(window, 0.4, 0.02, frozenset())


DECODERS = decoders(window=16)


def opened(prompt: list[int], max_tokens: int = 3, **more: object) -> Session:
    session = make_session(prompt, max_tokens, **more)  # type: ignore[arg-type]
    session.slot = 0
    return session


class Alone:
    """A session and a chain that it has to itself."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.chain = FakeChain()
        self.windows: list[Window] = []

    def step(self) -> list[Sample]:
        window = self.session.next_window()
        self.windows.append(window)
        opened = [] if len(self.windows) > 1 else [Opening(slot=0)]
        self.chain.send(Frame(epoch=1, step=len(self.windows), opened=opened, windows=[window]))
        result = self.chain.receive()
        return self.session.commit(result.samples, result.guesses)

    def run(self) -> None:
        while self.session.finish_reason is None:
            self.step()


def run(session: Session) -> list[Window]:
    alone = Alone(session)
    alone.run()
    return alone.windows


@pytest.mark.parametrize(
    ("num_prompt", "chunk", "expected"),
    [
        (1, 4, [(0, 1, 1)]),
        (3, 4, [(0, 3, 1)]),
        (4, 4, [(0, 4, 1)]),
        (5, 4, [(0, 4, 0), (4, 1, 1)]),
        (7, 4, [(0, 4, 0), (4, 3, 1)]),
        (8, 4, [(0, 4, 0), (4, 4, 1)]),
        (9, 4, [(0, 4, 0), (4, 4, 0), (8, 1, 1)]),
        (3, 1, [(0, 1, 0), (1, 1, 0), (2, 1, 1)]),
        (700, 300, [(0, 300, 0), (300, 300, 0), (600, 100, 1)]),
    ],
)
def test_a_prompt_goes_in_whole_chunks_and_a_rest_and_only_its_last_row_is_wanted(
    num_prompt: int, chunk: int, expected: list[tuple[int, int, int]]
) -> None:
    windows = run(opened(prompt_of(num_prompt), 1, chunk=chunk))
    assert [(w.base, len(w.tokens), w.wanted) for w in windows] == expected
    assert not any(w.masks or w.guessed for w in windows)


@pytest.mark.parametrize(
    ("num_prompt", "chunk", "expected"),
    [
        (1, 8, [(0, 1, 4)]),
        (4, 8, [(0, 4, 4)]),  # as many tokens as the decoder allows beside a proposal
        (5, 8, [(0, 4, 0), (4, 1, 4)]),  # the last one is left for it
        (8, 8, [(0, 7, 0), (7, 1, 4)]),
        (9, 8, [(0, 8, 0), (8, 1, 4)]),
        (12, 8, [(0, 8, 0), (8, 4, 4)]),
        (13, 8, [(0, 8, 0), (8, 4, 0), (12, 1, 4)]),
    ],
)
def test_where_a_decoder_adds_mask_rows_only_few_tokens_of_the_prompt_share_their_window(
    num_prompt: int, chunk: int, expected: list[tuple[int, int, int]]
) -> None:
    session = opened(prompt_of(num_prompt), 20, chunk=chunk, decoder=fill(4))
    windows = []
    while session.is_ready and len(windows) <= len(expected):
        windows.append(session.next_window())
    assert [(w.base, len(w.tokens), w.guessed) for w in windows] == expected


@pytest.mark.parametrize(
    ("max_tokens", "eos_at", "reason", "num_generated"),
    [(5, None, "length", 5), (1, None, "length", 1), (5, 2, "stop", 3), (5, 0, "stop", 1), (3, 2, "stop", 3)],
)
def test_why_a_session_ends(max_tokens: int, eos_at: int | None, reason: str, num_generated: int) -> None:
    """Each token after the prompt goes alone and is wanted; an end-of-sequence token of the prompt ends nothing."""
    prompts = ([VOCAB + 1, *prompt_of(6, seed=seed)] for seed in range(50))
    prompt = next(prompt for prompt in prompts if len(set(plain_answer(prompt, 5))) == 5)  # nothing twice
    plain = plain_answer(prompt, max_tokens)
    eos = frozenset({VOCAB + 1}) | (frozenset() if eos_at is None else {plain[eos_at]})
    session = opened(prompt, max_tokens, eos=eos)
    windows = run(session)[1:]
    assert session.finish_reason == reason
    assert session.generated == plain[:num_generated]
    assert [(w.base, list(w.tokens), w.wanted) for w in windows] == [
        (7 + i, [token], 1) for i, token in enumerate(session.generated[:-1])
    ]


def test_a_session_is_ready_while_it_has_chunks_and_then_again_once_its_proposal_is_answered() -> None:
    session = opened(prompt_of(9), 3, chunk=4)
    alone = Alone(session)
    states = [(session.is_prefilling, session.is_ready, session.is_streaming)]
    while session.finish_reason is None:
        alone.step()
        states.append((session.is_prefilling, session.is_ready, session.is_streaming))
    assert states == [
        (True, True, False),
        (True, True, False),
        (False, True, False),  # one token of the prompt is left: the size of a decoding step
        (False, True, True),
        (False, True, True),
        (False, False, True),
    ]
    waiting = opened(prompt_of(2))
    waiting.next_window()
    assert not waiting.is_ready


def test_what_is_reused_is_not_fed_again_and_one_token_at_least_is_fed() -> None:
    prompt = prompt_of(20)
    session = opened(prompt, chunk=8)
    for num_tokens in (20, 21):
        with pytest.raises(AssertionError):
            session.reuse(num_tokens)
    session.reuse(10)
    window = session.next_window()
    assert (window.base, list(window.tokens)) == (10, prompt[10:18])
    assert window.prefix_hash == session.history.prefix_hash(10)
    assert (session.num_reused, session.fed, session.num_unfed, session.num_rows) == (10, 18, 2, 8)
    with pytest.raises(AssertionError):  # something has been fed
        session.reuse(15)
    session.finish()
    assert session.finish_reason == "stop" and not session.is_ready


@pytest.mark.parametrize("kind", DECODERS)
def test_no_window_writes_more_rows_than_were_promised(kind: str) -> None:
    for num_prompt in (1, 2, 15, 16, 17, 40, 64, 100):
        for max_tokens in (1, 2, 7, 31, 60):
            for chunk in (1, 8, 256):
                session = opened(prompt_of(num_prompt), max_tokens, chunk=chunk, decoder=DECODERS[kind]())
                most = session.most_rows
                written = max(window.base + num_rows(window) for window in run(session))
                assert written == session.rows_written <= most == session.most_rows


def test_steps_and_rows_are_counted_those_that_are_fed_again_too() -> None:
    session = opened(prompt_of(9), 5, chunk=4)
    windows = run(session)
    assert session.num_steps == 5 == sum(window.wanted for window in windows)
    assert session.num_rows == 9 + 4
    alone = Alone(opened(prompt_of(1), 60, decoder=fill()))
    while (filled := alone.session).finish_reason is None:
        alone.step()
        assert filled.num_rows_last == num_rows(alone.windows[-1])
    assert any(window.positions for window in alone.windows), "some were filled out of order"
    assert filled.num_steps == sum(window.guessed > 0 for window in alone.windows)
    assert filled.num_rows == sum(map(num_rows, alone.windows))


@pytest.mark.parametrize("name", ["ar", "ngram"])
def test_the_rows_of_a_prompts_end_say_nothing_of_those_to_come(name: str) -> None:
    alone = Alone(opened(prompt_of(9), 3, decoder=DECODERS[name]()))
    alone.step()
    assert num_rows(alone.windows[0]) == 9 and alone.session.num_rows_last == 1
