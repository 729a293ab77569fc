"""Decoders: what a step proposes beyond the known tokens, and how much of it becomes known. Pure.

Every decoder feeds the known tokens that no cache holds yet. Beyond them it may propose drafts (to be verified: each
row's own next token decides), fills (tokens at positions ahead, which will not change), MASK rows, for which the last
stage guesses, and a canvas, whose rows see each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from coordinator.decoding.suffix_automaton import TextSearch
from coordinator.decoding.window_lengths import (
    MASK_WINDOWS,
    WindowChooser,
    largest_within,
    mask_count,
    most_masks,
    most_padding,
)
from protos.brigade_pb2 import CONDITIONING_NONE, Conditioning, Sample
from worker.memory.history import common_prefix
from worker.model.model_spec import MOST_DRAFTS, CanvasTraining, Refinement

_LOW_64 = (1 << 64) - 1

Fills = Sequence[tuple[int, Sample]]  # positions and their tokens


@dataclass(frozen=True)
class Proposal:
    """The part of a window after the known tokens."""

    drafts: tuple[int, ...] = ()
    fills: tuple[tuple[int, int], ...] = ()  # (position, token), ascending
    masks: tuple[int, ...] = ()  # positions of the MASK rows to guess, ascending
    to_draft: int = 0  # drafts for the last stage's drafter to make after what holds
    canvas: tuple[int, ...] = ()  # token ids of its places
    num_fixed: int = 0  # known tokens that are its first places, and not in the window before it
    guessed: range = range(0)  # numbers of its rows that the last stage guesses; no others go through the head
    step: int = 0  # of denoising it, from 1
    temperature: float = 0.0  # of this step's logits; 0: they are taken as they are
    conditioning: Conditioning = CONDITIONING_NONE  # what the next step is to know of this one
    verifies: bool = True  # whether each token row from the last known one on samples its next token


@dataclass(frozen=True)
class Accepted:
    """New known tokens, and how many of them the caches hold already."""

    samples: list[Sample] = field(default_factory=list)
    num_cached: int = 0


class Decoder(Protocol):
    """One session's way to decode; holds what it expects beyond the known tokens."""

    @property
    def tail(self) -> int:
        """The most known tokens that go into one window with a proposal; 0: as many as make a full chunk."""

    @property
    def grid(self) -> int:
        """Known tokens are fed in whole blocks of so many."""

    @property
    def num_ahead(self) -> int:
        """The most rows that a window has beyond the last token that may become known."""

    @property
    def fills(self) -> Fills:
        """The tokens that are decided ahead of the known ones, by ascending position."""

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        """Return what to feed after `tokens`, the last `num_unfed` of which are in the window too.

        `room` is the number of tokens that may still become known, at least 1; `num_together` sessions share the step.
        """

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        """Return what the answer to the proposal makes known."""

    def rewind(self) -> None:
        """Forget the last proposal: the caches are lost, and all known tokens are fed again."""

    def restore(self, fills: Fills) -> None:
        """Begin with what another decoder of the same settings had in `fills`."""


def verify_drafts(drafts: Sequence[int], samples: Sequence[Sample]) -> Accepted:
    """Return the drafts that equal the model's own samples, and the token after them.

    `samples[i]` is drawn after draft i - 1 as it would be in one-token decoding, by the same key, so the tokens are
    those of one-token decoding: greedy and sampled alike. For a draft taken as certain this is the accept/resample
    rule of speculative sampling (Leviathan et al., arXiv 2211.17192).
    """
    num_equal = common_prefix(drafts, [sample.token for sample in samples])
    return Accepted(list(samples[: num_equal + 1]), num_equal)


class Source(Protocol):
    """Proposes what a session tries next beyond its known tokens."""

    @property
    def tail(self) -> int:
        """As `Decoder.tail`."""

    @property
    def num_ahead(self) -> int:
        """As `Decoder.num_ahead`."""

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int) -> Proposal | None:
        """Return what to try, as `Decoder.propose`, or None to leave the step to the next source."""

    def learn(self, num_held: int, proposal: Proposal, guesses: Sequence[Sample]) -> None:
        """Learn from the answer to its proposal, of which so many drafts held."""

    def forget(self) -> None:
        """Forget what was to be tried next: the session went on without it."""


class Verified:
    """Drafts of one source or another, each verified: the tokens of one-token decoding.

    Without a source it makes one token per step.
    """

    fills: Fills = ()
    grid = 1

    def __init__(self, *sources: Source) -> None:
        """The first source that has something to try makes the proposal."""
        self._sources = sources
        self._source: Source | None = None  # of the present proposal
        self.num_ahead = max((source.num_ahead for source in sources), default=0)

    @property
    def tail(self) -> int:
        return max((source.tail for source in self._sources), default=0)

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        for source in self._sources:
            if proposal := source.propose(tokens, num_unfed, room, num_together):
                self._source = source
                return proposal
        self._source = None
        return Proposal()

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        accepted = verify_drafts(proposal.drafts, samples)
        for source in self._sources:
            if source is self._source:
                source.learn(accepted.num_cached, proposal, guesses)
            else:
                source.forget()
        return accepted

    def rewind(self) -> None:
        for source in self._sources:
            source.forget()

    def restore(self, fills: Fills) -> None:
        assert not fills


class TextDrafts:
    """Drafts copied from where the last tokens stood before, in this text or in another answer."""

    tail = 0
    num_ahead = 0  # a draft stands where a token may become known

    def __init__(
        self, chooser: WindowChooser, search: TextSearch, least: int = 2, rival: "DrafterDrafts | None" = None
    ) -> None:
        """
        Args:
            least: how many of the last tokens must have stood there; at most as many are drafted.
            rival: the source that makes the proposal if more tokens per second are expected of it.
        """
        self._chooser = chooser
        self._search = search
        self._least = least
        self._rival = rival

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int) -> Proposal | None:
        length = self._search.find(tokens)
        if num_unfed > 1 or length < self._least:
            return None
        instead = self._rival.speed(num_together) if self._rival else 0.0
        window = self._chooser.choose(num_together, most=1 + min(length, room - 1), instead=instead)
        drafts = self._search.drafts(window - 1) if window > 1 else []
        if not drafts:
            self._chooser.observe_drafts(0, 0)
            return None
        count = len(drafts) if self._chooser.is_fixed else largest_within(1 + len(drafts)) - 1
        return Proposal(drafts=tuple(drafts[:count]))

    def learn(self, num_held: int, proposal: Proposal, guesses: Sequence[Sample]) -> None:
        self._chooser.observe_drafts(num_held, len(proposal.drafts))

    def forget(self) -> None:
        pass  # the drafts depend on the known tokens only


class MaskDrafts:
    """Drafts from MASK rows of the window before (same-forward verification, as in TiDAR)."""

    def __init__(self, chooser: WindowChooser, eos: frozenset[int]) -> None:
        """`chooser` says how many MASK rows to aim at; as many tokens are fed at most."""
        # at least one token was known and one more may become so: all MASK rows but one may lie beyond
        self.num_ahead = max(most_masks(window) for window in chooser.windows) - 1
        self._chooser = chooser
        self._eos = eos
        self._drafts: list[int] = []
        self._window: int | None = None  # of the step to come, once it is chosen
        self._num_together = 1  # sessions for which it was chosen

    @property
    def tail(self) -> int:
        return self._choose(1)

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int) -> Proposal:
        window = self._choose(num_together)
        most = window or MASK_WINDOWS.smallest  # drafts of the last window count even if this one is none
        drafts = tuple(self._drafts[: min(most, room) - 1])
        ends = not window or (drafts and drafts[-1] in self._eos)
        num_masks = 0 if ends else mask_count(num_unfed + len(drafts), window)
        first = len(tokens) + len(drafts)
        return Proposal(drafts=drafts, masks=tuple(range(first, first + num_masks)))

    def learn(self, num_held: int, proposal: Proposal, guesses: Sequence[Sample]) -> None:
        self._window = None
        self._chooser.observe_drafts(num_held, len(proposal.drafts))
        whole = num_held == len(proposal.drafts)
        # the first guess is for the place that the last sample took; after a rejection all are for another text
        self._drafts = until_eos([guess.token for guess in guesses[1:]], self._eos) if whole else []

    def forget(self) -> None:
        self._drafts, self._window = [], None

    def _choose(self, num_together: int) -> int:
        """Return the step's window, chosen once: choosing costs more than all other work for a window.

        What was chosen for the end of a prompt becomes shorter if others share its step, never longer.
        """
        if self._window is None:
            self._window, self._num_together = self._chooser.choose(num_together), num_together
        elif self._window and num_together > self._num_together:
            self._window, self._num_together = min(self._window, self._chooser.choose(num_together)), num_together
        return self._window


class DrafterDrafts:
    """Drafts that the last stage's drafter made after what held of the window before."""

    tail = 0
    num_ahead = 0

    def __init__(
        self, chooser: WindowChooser, eos: frozenset[int], most_drafts: Callable[[], int] = lambda: MOST_DRAFTS
    ) -> None:
        """`most_drafts` returns how many the present chain's drafter makes at most; 0 without one."""
        self._chooser = chooser
        self._eos = eos
        self._most_drafts = most_drafts
        self._drafts: list[int] = []

    def speed(self, num_together: int) -> float:
        """Return the tokens per second that are expected of it; 0 while not known."""
        return self._chooser.speed(num_together, 1 + self._most_drafts())

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int) -> Proposal | None:
        most = self._most_drafts()
        if not most:
            return None
        window = self._chooser.choose(num_together, 1 + most)
        # after this step at least one more token is known, and one more must have room after the drafts
        return Proposal(drafts=tuple(self._drafts[: room - 1]), to_draft=max(0, min(window - 1, room - 2)))

    def learn(self, num_held: int, proposal: Proposal, guesses: Sequence[Sample]) -> None:
        self._chooser.observe_drafts(num_held, len(proposal.drafts))
        self._drafts = until_eos([guess.token for guess in guesses], self._eos)

    def forget(self) -> None:
        self._drafts = []


class DiffusionFast:
    """WeDLM's own decoder: confident guesses are filled in and kept, the leading run of them becomes known.

    WeDLM, arXiv 2512.22737, Algorithm 1 and Eq. 11; filled tokens come first in the window, MASK rows after them.
    """

    grid = 1

    def __init__(self, window: int, threshold: float, penalty: float, eos: frozenset[int]) -> None:
        """`threshold` in nats; `penalty` in nats per position from the leftmost MASK."""
        self.tail = window
        self.num_ahead = most_padding(2 * window)  # of known tokens and of positions that may become so
        self._threshold = threshold
        self._penalty = penalty
        self._eos = eos
        self._filled: dict[int, Sample] = {}

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        end = len(tokens) + min(self.tail, room)
        end = min([end, *(at for at, sample in self._filled.items() if sample.token in self._eos)])
        masks = tuple(at for at in range(len(tokens), end) if at not in self._filled)
        fills = tuple((at, sample.token) for at, sample in sorted(self._filled.items()))
        return Proposal(fills=fills, masks=masks, verifies=False)

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        entropies = [guess.entropy for guess in guesses]
        for chosen in choose_fills(proposal.masks, entropies, self._threshold, self._penalty):
            self._filled[proposal.masks[chosen]] = guesses[chosen]
        ends = [at for at, sample in self._filled.items() if sample.token in self._eos]
        self._filled = {at: sample for at, sample in self._filled.items() if not ends or at <= min(ends)}
        run = []
        at = proposal.masks[0]
        while at in self._filled:
            run.append(self._filled.pop(at))
            at += 1
        return Accepted(run)

    def rewind(self) -> None:
        pass  # filled tokens are final, and later ones depend on them

    @property
    def fills(self) -> Fills:
        return sorted(self._filled.items(), key=lambda item: item[0])

    def restore(self, fills: Fills) -> None:
        self._filled = dict(fills)


CanvasSampler = Callable[[Sequence[Sample], int], list[int]]  # guesses and the step to the numbers of those to keep


class _CanvasDecoder:
    """What both decoders of canvases share: after a loss a canvas begins again, with no place kept."""

    fills: Fills = ()
    _places: list[int]  # tokens; empty: the next proposal begins a canvas

    def rewind(self) -> None:
        self._places = []

    def restore(self, fills: Fills) -> None:
        assert not fills


class Canvas(_CanvasDecoder):
    """Block diffusion: the places of a canvas are decided together over several steps, then all become known.

    A place that is decided stays so. A finished canvas is known and not fed yet: it goes with the next one. Draws
    depend on seed, place and step only, so a canvas that begins again after a loss ends with the same tokens.
    """

    def __init__(
        self, training: CanvasTraining, length: int, sampler: CanvasSampler, num_steps: int, eos: frozenset[int]
    ) -> None:
        """`length` counts places; the step `num_steps` decides all that are left."""
        assert training.noise is not None, "of a model whose decided places stay"
        self.tail = self.num_ahead = length
        self.grid = training.grid
        self._training, self._noise = training, training.noise
        self._sampler = sampler
        self._num_steps = num_steps
        self._eos = eos
        self._places = []
        self._num_fixed = 0
        self._open: list[int] = []  # numbers of the places to decide
        self._step = 0

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        if not self._places:
            self._num_fixed = len(tokens) % self.grid
            if self._training.is_shifted and not self._num_fixed:
                return Proposal()  # the row before a canvas says its first place
            num_open = self.tail - self._num_fixed
            self._places = [*tokens[len(tokens) - self._num_fixed :], *[self._noise] * num_open]
            self._open = list(range(self._num_fixed, self.tail))
            self._step = 0
        step, shift = self._step + 1, self._training.is_shifted
        last = self._open[-1] if step >= self._num_steps else self._candidates()[-1]
        guessed = range(self._open[0] - shift, last - shift + 1)
        canvas = tuple(self._places)
        return Proposal(canvas=canvas, num_fixed=self._num_fixed, guessed=guessed, step=step, verifies=False)

    def _candidates(self) -> list[int]:
        """Return the places that the next step may decide."""
        part = self._training.part or self.tail
        return [place for place in self._open if place // part == self._open[0] // part]

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        if not proposal.canvas:
            return Accepted(list(samples))
        self._step = proposal.step
        first = proposal.guessed.start + self._training.is_shifted  # the place that the first guess is for
        candidates = self._candidates()
        found = [guesses[place - first] for place in candidates]
        for number in self._sampler(found, self._step):
            self._decide(candidates[number], found[number].token)
        if self._step >= self._num_steps:
            for place in list(self._open):
                self._decide(place, guesses[place - first].likeliest)
        end = self._end()
        self._open = [place for place in self._open if place < end]
        if self._open:
            return Accepted()
        decided = [Sample(slot=guesses[0].slot, token=token) for token in self._places[self._num_fixed : end]]
        self._places = []
        return Accepted(decided)

    def _decide(self, place: int, token: int) -> None:
        self._places[place] = token
        self._open.remove(place)

    def _end(self) -> int:
        """Return the number of places up to the first decided one that ends the text."""
        ends = (
            place + 1
            for place in range(self._num_fixed, self.tail)
            if self._places[place] in self._eos and place not in self._open
        )
        return next(ends, self.tail)


class RefinedCanvas(_CanvasDecoder):
    """Block diffusion from random tokens: every step sees the whole canvas again and may change any of its places.

    A step keeps the draws that its sampler accepts and puts new random tokens in all other places. The canvas ends once
    its likeliest tokens stay and are sure, once every place is kept for good, or with the last step; then the likeliest
    tokens of that step become known, and are fed together with the next canvas. Canvases keep their length up to the
    end, so that neither `max_tokens` nor a loss of memory changes the tokens before.
    """

    grid = 1

    def __init__(
        self,
        refinement: Refinement,
        length: int,
        sampler: CanvasSampler,
        num_steps: int,
        eos: frozenset[int],
        seed: int,
        vocab_size: int,
        *,
        keeps: bool,
        conditioning: Conditioning,
    ) -> None:
        """
        Args:
            length: places.
            keeps: whether a place that the sampler accepts stays as it is while the canvas lasts.
            conditioning: what a step is to know of the one before.
        """
        self.tail = self.num_ahead = length
        self._refinement = refinement
        self._sampler = sampler
        self._num_steps, self._step = num_steps, 0
        self._eos = eos
        self._seed, self._vocab_size = seed, vocab_size
        self._keeps = keeps
        self._conditioning = conditioning
        self._places = []
        self._start = 0
        self._open: list[int] = []  # numbers of the places that a step may change
        self._best: list[int] = []  # the likeliest tokens of the last step
        self._num_stable = 0  # steps for which they have stayed

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        if not self._places:
            self._start, self._step = len(tokens), 0
            self._places = [self._noise(place) for place in range(self.tail)]
            self._open = list(range(self.tail))
            self._best, self._num_stable = [], 0
        step = self._step + 1
        return Proposal(
            canvas=tuple(self._places),
            guessed=range(self.tail),
            step=step,
            verifies=False,
            temperature=self._refinement.temperature(step, self._num_steps),
            conditioning=self._conditioning if step < self._num_steps else CONDITIONING_NONE,
        )

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        self._step = proposal.step
        best = [guess.likeliest for guess in guesses]
        self._num_stable = self._num_stable + 1 if best == self._best else 0
        self._best = best
        accepted = {
            self._open[number] for number in self._sampler([guesses[place] for place in self._open], self._step)
        }
        for place in self._open:
            self._places[place] = guesses[place].token if place in accepted else self._noise(place)
        if self._keeps:
            self._open = [place for place in self._open if place not in accepted]
        if self._open and self._step < self._num_steps and not self._is_sure(guesses):
            return Accepted()
        self._places = []
        return Accepted([Sample(slot=guesses[0].slot, token=token) for token in until_eos(best, self._eos)])

    def _is_sure(self, guesses: Sequence[Sample]) -> bool:
        is_stable = self._num_stable >= self._refinement.stop_steps
        return is_stable and sum(guess.entropy for guess in guesses) < self._refinement.stop_entropy * len(guesses)

    def _noise(self, place: int) -> int:
        return random_token(self._seed, self._start + place, self._step, self._vocab_size)


def random_token(seed: int, position: int, step: int, vocab_size: int) -> int:
    """Return the random token of a place after so many steps: splitmix64 (Steele et al., OOPSLA 2014) of the three."""
    mixed = seed + (position + 1) * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 & _LOW_64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & _LOW_64
    return (mixed ^ mixed >> 31) % vocab_size


def choose_confident(guesses: Sequence[Sample], step: int, early: float, late: float, turn: int) -> list[int]:
    """Return the guesses of at least the probability `early`, from step `turn` on `late`, or else the likeliest one."""
    threshold = late if step >= turn else early
    # a peer may send any number: above 0 it would overflow
    chosen = [number for number, guess in enumerate(guesses) if math.exp(min(guess.logprob, 0.0)) >= threshold]
    return chosen or [max(range(len(guesses)), key=lambda number: guesses[number].logprob)]


def choose_certain(guesses: Sequence[Sample], step: int, early: float, late: float, turn: int) -> list[int]:
    """Return guesses by ascending entropy while those before them sum to at most `early` nats, later `late`.

    The entropy bound of masked diffusion samplers (Ben-Hamu et al., arXiv 2505.24857); at least one is chosen.
    """
    bound = late if step >= turn else early
    order = sorted(range(len(guesses)), key=lambda number: guesses[number].entropy)
    sums = accumulate((guesses[number].entropy for number in order), initial=0.0)
    return [number for number, before in zip(order, sums, strict=False) if before <= bound]


def choose_fills(positions: Sequence[int], entropies: Sequence[float], threshold: float, penalty: float) -> list[int]:
    """Return the MASK rows to fill, by entropy and distance, or else the best one (WeDLM, Eq. 11)."""
    adjusted = [h + penalty * (at - positions[0]) for at, h in zip(positions, entropies, strict=True)]
    chosen = [row for row, value in enumerate(adjusted) if value < threshold]
    return chosen or [adjusted.index(min(adjusted))]


def until_eos(tokens: Sequence[int], eos: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first end-of-sequence token."""
    for number, token in enumerate(tokens, 1):
        if token in eos:
            return list(tokens[:number])
    return list(tokens)
