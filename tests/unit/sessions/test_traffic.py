"""Whatever requests come and go over lost chains: memory is never reserved twice, each gets what it would get alone."""

import random
from operator import le
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.sessions.session import Session
from protos.brigade_pb2 import CACHE_FULL, CACHE_INT8, Cache
from tests.unit.fake_chain import PLENTY, VOCAB, Rig, prompt_of
from tests.unit.sessions.test_rewind import Asked
from worker.errors import InputError, QueueFull

TEXTS = [prompt_of(60, seed=seed) for seed in (1, 2)]  # prompts begin with a part of one of them
MAX_WAITING = 4


class Traffic:
    """Requests that come, step, leave and end in any order, on chains with room for a few of them that may be lost."""

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.rig = Rig(
            num_stages=numbers.randint(1, 3),
            chunk=numbers.choice([5, 32, 256]),
            budget=numbers.choice([150, 400, 1200]),
            cuttable=numbers.choice([PLENTY, PLENTY, 40, 0]),
            max_waiting=MAX_WAITING,
            keep=numbers.random() < 0.8,
        )
        self.rig.chain.is_lossy = numbers.random() < 0.5
        self.alive: dict[Session, tuple[Asked, list[int]]] = {}  # with the tokens that each should get
        self.ended: list[Session] = []  # to be continued

    def run(self, num_moves: int) -> None:
        moves = {
            self.submit: 6.0,
            self.go_on: 2.0,
            self.send: 6.0,
            self.take: 6.0,
            self.step: 4.0,
            self.cancel: 1.0,
            self.pause: 1.0,
            self.forget: 1.0,
            self.lose: 0.4,
        }
        for move in self.numbers.choices([*moves], [*moves.values()], k=num_moves):
            move()
            self.check_what_is_reserved()
        for session in self.alive:
            session.is_paused = False
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
        prompt = [*shared, *rest] if numbers.random() < 0.7 else rest * 3  # so that something can be looked up
        self._submit(prompt, numbers.randint(1, 25), eos, kind, cache)

    def go_on(self) -> None:
        """The next turn of a conversation."""
        if self.ended:
            before, kind = self.numbers.choice(self.ended), self.numbers.choice(["ar", "ngram"])
            prompt = [*before.history.tokens, self.numbers.randrange(VOCAB)]
            self._submit(prompt, 10, frozenset(), kind, before.request.cache)

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
            session = self.numbers.choice([*self.alive])
            del self.alive[session]
            self.rig.scheduler.close(session, keep=self.numbers.random() < 0.5)
            self.ended.append(session)

    def pause(self) -> None:
        """A reader that does not read, or that reads again."""
        if self.alive:
            session = self.numbers.choice([*self.alive])
            session.is_paused = not session.is_paused

    def lose(self) -> None:
        self.rig.lose_chain(self.alive)

    def forget(self) -> None:
        self.rig.scheduler.slots.forget_kept()

    def check_what_is_reserved(self) -> None:
        reserved, budgets = self.rig.scheduler.slots.reserved, self.rig.costs.budgets
        assert all(bytes_ <= budget for bytes_, budget in zip(reserved, budgets, strict=True))

    def check_what_is_held(self) -> None:
        """What is to be freed or cut is so by the next frame: until then the stages may hold more."""
        slots = self.rig.scheduler.slots
        if not slots.closed:
            held = self.rig.chain.held(self.rig.costs.bytes_of)
            assert all(bytes_ <= reserved for bytes_, reserved in zip(held, slots.reserved, strict=True))

    def check_tokens(self) -> None:
        for session, (asked, expected) in list(self.alive.items()):
            tokens = session.history.tokens
            assert session.num_prompt == len(asked.prompt) and tokens == [*asked.prompt, *expected][: len(tokens)]
            if session.finish_reason is not None:
                assert session.generated == expected
                assert session.finish_reason == ("stop" if expected[-1] in asked.eos else "length")
                del self.alive[session]
                self.ended.append(session)

    def _submit(self, prompt: list[int], max_tokens: int, eos: frozenset[int], kind: str, cache: Cache) -> None:
        kind = kind if self.rig.chain.cuttable == PLENTY else "ar"
        seed, priority = self.numbers.choice([0, self.numbers.randrange(99)]), self.numbers.choice([0, 0, 5])
        turn_ends = tuple(sorted(self.numbers.sample(range(1, 80), 3))) if self.numbers.random() < 0.5 else ()
        asked = Asked(prompt, max_tokens, eos, kind, seed, 4, cache, priority, turn_ends)
        slots = self.rig.scheduler.slots
        num_waiting, needed = slots.num_waiting, self.rig.costs.bytes_of(cache, asked.build(self.rig).most_rows)
        fits = all(map(le, needed, self.rig.costs.budgets))
        try:
            session = asked.submit(self.rig)
        except InputError:
            assert not fits
        except QueueFull:
            assert fits and num_waiting >= slots.max_waiting
        else:
            assert fits and (num_waiting < slots.max_waiting or session.slot is not None)
            self.alive[session] = asked, asked.undisturbed(self.rig.chain.is_lossy)


@settings(max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_any_traffic_keeps_within_memory_and_gives_everyone_their_own_tokens(numbers: random.Random) -> None:
    with patch.multiple("coordinator.sessions.session", LEAST_SAVED=4, SNAPSHOT_EVERY=24):
        Traffic(numbers).run(120)
