"""Whatever requests come and go: memory is never promised twice, and each gets the tokens that it would get alone."""

import random
from operator import le

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.sessions.session import Session
from protos.brigade_pb2 import CACHE_FULL, CACHE_INT8, Cache
from tests.unit.fake_chain import PLENTY, VOCAB, Rig, decoders, make_session, plain_answer, prompt_of
from worker.errors import InputError, QueueFull

TEXTS = [prompt_of(60, seed=seed) for seed in (1, 2)]  # prompts begin with a part of one of them
MAX_WAITING = 4


class Traffic:
    """Requests that come, step, leave and end in any order, on a chain with room for a few of them."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.rig = Rig(
            num_stages=numbers.randint(1, 3),
            chunk=numbers.choice([5, 32, 256]),
            budget=numbers.choice([150, 400, 1200]),
            cuttable=numbers.choice([PLENTY, PLENTY, 40, 0]),
            max_waiting=MAX_WAITING,
            keep=True,
        )
        self.alive: list[tuple[Session, list[int]]] = []  # with the tokens that each should get
        self.ended: list[Session] = []  # to be continued

    def run(self, num_moves: int) -> None:
        moves = {
            self.submit: 6,
            self.go_on: 2,
            self.send: 6,
            self.take: 6,
            self.step: 4,
            self.cancel: 1,
            self.forget: 1,
        }
        for move in self.numbers.choices([*moves], [*moves.values()], k=num_moves):
            move()
            self.check_what_is_promised()
        for _ in range(3000):
            if self.alive:
                self.step()
        assert not self.alive, "some never end"
        self.rig.end()

    def submit(self) -> None:
        numbers = self.numbers
        shared = numbers.choice(TEXTS)[: numbers.randint(0, 60)]
        kind = numbers.choice(["ar", "ar", "ngram", "diffusion", "diffusion-fast"])
        cache = Cache(kind=numbers.choice([CACHE_FULL, CACHE_FULL, CACHE_FULL, CACHE_INT8]))
        eos = frozenset(numbers.sample(range(VOCAB), numbers.choice([0, 1, 8])))
        rest = [numbers.randrange(VOCAB) for _ in range(numbers.choice([1, 5, 60]))]
        self._submit([*shared, *rest], numbers.randint(1, 25), kind, cache, eos)

    def go_on(self) -> None:
        """The next turn of a conversation."""
        if self.ended:
            before, kind = self.numbers.choice(self.ended), self.numbers.choice(["ar", "ngram"])
            self._submit(
                [*before.history.tokens, self.numbers.randrange(VOCAB)], 10, kind, before.request.cache, frozenset()
            )

    def send(self) -> None:
        self.rig.send_one()
        self.check_what_is_held()

    def take(self) -> None:
        if self.rig.chain.in_flight:
            self.rig.take_one()
            self.check_tokens()

    def step(self) -> None:
        for _ in range(self.numbers.choice([1, 8])):
            while self.rig.send_one():
                self.check_what_is_held()
            self.take()

    def cancel(self) -> None:
        if self.alive:
            session, _ = self.alive.pop(self.numbers.randrange(len(self.alive)))
            self.rig.scheduler.close(session)

    def forget(self) -> None:
        self.rig.scheduler.slots.forget_kept()

    def check_what_is_promised(self) -> None:
        promised, budgets = self.rig.scheduler.slots.promised, self.rig.costs.budgets
        assert all(bytes_ <= budget for bytes_, budget in zip(promised, budgets, strict=True))

    def check_what_is_held(self) -> None:
        """What is to be freed or cut is so by the next frame: until then the stages may hold more."""
        slots = self.rig.scheduler.slots
        if not slots.closed:
            held = self.rig.chain.held(self.rig.costs.bytes_of)
            assert all(bytes_ <= promised for bytes_, promised in zip(held, slots.promised, strict=True))

    def check_tokens(self) -> None:
        for session, expected in list(self.alive):
            assert session.generated == expected[: session.num_generated]
            if session.finish_reason is not None:
                assert session.generated == expected
                self.alive.remove((session, expected))
                self.ended.append(session)

    def _submit(self, prompt: list[int], max_tokens: int, kind: str, cache: Cache, eos: frozenset[int]) -> None:
        kind = kind if self.rig.chain.cuttable == PLENTY else "ar"
        num_waiting = self.rig.scheduler.num_waiting
        probe = make_session(prompt, max_tokens, eos, decoders(eos, window=4)[kind]())
        needed = self.rig.costs.bytes_of(cache, probe.most_rows)
        fits = all(map(le, needed, self.rig.costs.budgets))
        try:
            session = self.rig.submit(prompt, max_tokens, eos, decoder=decoders(eos, window=4)[kind](), cache=cache)
        except InputError:
            assert not fits
        except QueueFull:
            assert fits and num_waiting == MAX_WAITING
        else:
            assert fits and num_waiting < MAX_WAITING
            self.alive.append((session, plain_answer(prompt, max_tokens, eos)))


@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_any_traffic_keeps_within_memory_and_gives_everyone_their_own_tokens(numbers: random.Random) -> None:
    Traffic(numbers).run(120)
