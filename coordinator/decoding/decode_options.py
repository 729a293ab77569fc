"""The choice of a decoder and a cache, and whether a model supports them. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from coordinator.decoding.decoders import (
    Canvas,
    Decoder,
    DiffusionFast,
    DrafterDrafts,
    MaskDrafts,
    RefinedCanvas,
    TextDrafts,
    Verified,
    choose_certain,
    choose_confident,
)
from coordinator.decoding.suffix_automaton import SuffixAutomaton, TextSearch
from coordinator.decoding.window_lengths import DRAFTER_WINDOWS, LENGTHS, MASK_WINDOWS, TEXT_WINDOWS, WindowChooser
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import (
    CACHE_FULL,
    CACHE_INT4,
    CACHE_INT8,
    CACHE_ROTATING,
    CACHE_UNSPECIFIED,
    CONDITIONING_EXACT,
    CONDITIONING_TOP,
    Cache,
)
from worker.compute.header import NUM_CANDIDATES
from worker.errors import InputError
from worker.model.model_spec import MOST_DRAFTS, CanvasTraining, ModelSpec

KINDS = ("auto", "ar", "ngram", "draft", "diffusion", "diffusion-fast", "canvas")
LOSSY = ("diffusion-fast", "canvas")  # their tokens are not those of one-token decoding
_CACHES = {"full": CACHE_FULL, "rotating": CACHE_ROTATING, "int8": CACHE_INT8, "int4": CACHE_INT4}
CanvasSampling = Literal["confidence", "entropy"]
Conditioned = Literal["exact", "top-64"]
_CONDITIONINGS = {"exact": CONDITIONING_EXACT, "top-64": CONDITIONING_TOP}
_CANVAS_SAMPLERS = {"confidence": choose_confident, "entropy": choose_certain}
# confidence: probabilities; entropy: nats. At first, later, and from which step
_CANVAS_THRESHOLDS = {"confidence": (0.95, 0.8, 8), "entropy": (0.1, 0.1, 1)}
FILL_WINDOW = 16  # of diffusion-fast, whose text depends on it: never chosen by measurement
LARGEST_WINDOW = LENGTHS[-1] // 2  # MASK rows and as many drafts still make one of the lengths
_LONG_MATCH = 8  # tokens that must have stood in the text for its drafts to be tried before a drafter's
_MOST_DIGITS = 11  # of a number of tokens
_KEEP = 4  # tokens at the beginning that a rotating cache never drops, as in mlx-lm
_LEAST_RECENT = 5  # tokens beside them
SYSTEM = "system"


@dataclass(frozen=True)
class Decode:
    """A decoder and its numbers: MASK rows, drafts (None: chosen by measurement), nats, nats per position."""

    kind: str = "ar"
    window: int | None = None
    entropy_threshold: float = 0.4
    position_penalty: float = 0.02
    num_drafts: int | None = None
    canvas: int | None = None  # places; None: as many as the model was trained with
    # None: the model's own, which `suit` fills in
    canvas_steps: int | None = None  # at most, per canvas
    canvas_sampler: CanvasSampling | None = None
    canvas_threshold: tuple[float, float, int] | None = None  # the sampler's: at first, later, from which step
    conditioning: Conditioned = "exact"  # what a step of a model that refines its canvases knows of the one before
    training: CanvasTraining | None = None  # of the model, for canvas; likewise:
    vocab_size: int = 0
    calibrated_on: str | None = field(default=None, repr=False, compare=False)  # the model of a file's thresholds

    @property
    def reads_text(self) -> bool:
        """Whether drafts come from the text."""
        return self.kind in ("ngram", "draft")

    def make_decoder(
        self,
        eos: frozenset[int],
        costs: ChainCosts,
        ended: SuffixAutomaton | None = None,
        most_drafts: Callable[[], int] = lambda: MOST_DRAFTS,
        seed: int = 0,
    ) -> Decoder:
        """Return a new decoder.

        Args:
            costs: of the chain: they decide on windows and drafts that are not given.
            ended: answers of earlier requests of the same owner, to draft from.
            most_drafts: what the present chain's drafter makes after one window; 0 without one: a chain that took over
                may lack it.
            seed: of the request, for random tokens.
        """
        fixed = None if self.num_drafts is None else 1 + self.num_drafts
        if self.kind == "ngram":
            return Verified(TextDrafts(WindowChooser(costs.steps, TEXT_WINDOWS, fixed), TextSearch(ended)))
        if self.kind == "draft":
            drafted = DrafterDrafts(
                WindowChooser(costs.steps, DRAFTER_WINDOWS, fixed, costs.drafting), eos, most_drafts
            )
            if fixed:
                return Verified(drafted)
            text = TextDrafts(WindowChooser(costs.steps, TEXT_WINDOWS), TextSearch(ended), _LONG_MATCH, rival=drafted)
            return Verified(text, drafted)
        if self.kind == "diffusion":
            return Verified(MaskDrafts(WindowChooser(costs.steps, MASK_WINDOWS, self.window, costs.masks), eos))
        if self.kind == "diffusion-fast":
            return DiffusionFast(self.window or FILL_WINDOW, self.entropy_threshold, self.position_penalty, eos)
        if self.kind == "canvas":
            assert self.training and self.canvas and self.canvas_steps, "as `suit` returns it"
            assert self.canvas_sampler and self.canvas_threshold
            length, refinement = self.canvas, self.training.refinement
            early, late, turn = self.canvas_threshold
            choose = partial(_CANVAS_SAMPLERS[self.canvas_sampler], early=early, late=late, turn=turn)
            if refinement is None:
                return Canvas(self.training, length, choose, self.canvas_steps, eos)
            return RefinedCanvas(
                *(refinement, length, choose, self.canvas_steps, eos, seed, self.vocab_size),
                keeps=self.canvas_sampler == "confidence",
                conditioning=_CONDITIONINGS[self.conditioning],
            )
        return Verified()


_CANVAS_FIELDS = ("canvas", "canvas_steps", "canvas_sampler", "canvas_threshold", "conditioning")
# Fields by name: the default, and the decoders that they are for.
_OF_DECODERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "window": ("auto", ("auto", "diffusion", "diffusion-fast")),
    "num_draft_tokens": ("auto", ("auto", "ngram", "draft")),
    "entropy_threshold": (Decode.entropy_threshold, ("diffusion-fast",)),
    "position_penalty": (Decode.position_penalty, ("diffusion-fast",)),
    **dict.fromkeys(_CANVAS_FIELDS, (None, ("auto", "canvas"))),
    "conditioning": (Decode.conditioning, ("auto", "canvas")),
}


def takes(kind: str, field: str) -> bool:
    """Return whether this decoder may be given a field."""
    return kind in _OF_DECODERS[field][1]


DECODE_FIELDS = tuple(_OF_DECODERS)  # what clients choose beside the kind, as flags and in requests


def make_decode(
    kind: str,
    *,
    window: str | int = "auto",
    num_draft_tokens: str | int = "auto",
    entropy_threshold: float = Decode.entropy_threshold,
    position_penalty: float = Decode.position_penalty,
    canvas: int | None = None,
    canvas_steps: int | None = None,
    canvas_sampler: str | None = None,
    canvas_threshold: str | float | None = None,
    conditioning: str = Decode.conditioning,
) -> Decode:
    """Return the decoder that a client chooses; the parameters are DECODE_FIELDS.

    Raises:
        InputError: a value is invalid, or is for other decoders; it names the parameter.
    """
    if kind not in KINDS:
        raise InputError("decode", f"expected one of {', '.join(KINDS)}, got {kind!r}")
    given: dict[str, object] = {
        "window": window, "num_draft_tokens": num_draft_tokens,
        "entropy_threshold": entropy_threshold, "position_penalty": position_penalty,
        "canvas": canvas, "canvas_steps": canvas_steps, "canvas_sampler": canvas_sampler,
        "canvas_threshold": canvas_threshold, "conditioning": conditioning,
    }  # fmt: skip
    _require_own(kind, given)
    for name, nats in (("entropy_threshold", entropy_threshold), ("position_penalty", position_penalty)):
        if not (math.isfinite(nats) and nats >= 0):
            raise InputError(name, f"expected a number from 0, got {nats:g}")
    for name, number in (("canvas", canvas), ("canvas_steps", canvas_steps)):
        if number is not None and not 1 <= number < 2**16:
            raise InputError(name, f"expected a whole number from 1 to {2**16 - 1}, got {number}")
    sampler = next((name for name in get_args(CanvasSampling) if name == canvas_sampler), None)
    if sampler is None and canvas_sampler is not None:
        raise InputError("canvas_sampler", f"expected {' or '.join(_CANVAS_SAMPLERS)}, got {canvas_sampler!r}")
    conditioned = next((name for name in get_args(Conditioned) if name == conditioning), None)
    if conditioned is None:
        raise InputError("conditioning", f"expected {' or '.join(_CONDITIONINGS)}, got {conditioning!r}")
    return Decode(
        *(kind, _length("window", str(window), LARGEST_WINDOW), entropy_threshold, position_penalty),
        num_drafts=_length("num_draft_tokens", str(num_draft_tokens), MOST_DRAFTS),
        canvas=canvas,
        canvas_steps=canvas_steps,
        canvas_sampler=sampler,
        canvas_threshold=None if canvas_threshold is None else _thresholds(str(canvas_threshold)),
        conditioning=conditioned,
    )


def _length(name: str, text: str, most: int) -> int | None:
    """Return a number from 1 to `most`, or None for `auto`. Raises InputError for any other text."""
    if text == "auto":
        return None
    if not (text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise InputError(name, f"expected a whole number from 1 to {most} or `auto`, got {text!r}")
    return int(text)


def _require_own(kind: str, given: Mapping[str, object], found: str = "") -> None:
    """Raise InputError for a field that is for other decoders; `found` says which one was asked for."""
    for name, value in given.items():
        default, kinds = _OF_DECODERS[name]
        if value != default and kind not in kinds:
            expected = f"expected with the decoder {' or '.join(each for each in kinds if each != 'auto')} only"
            raise InputError(name, f"{expected}, got it with {found or kind}; ask for such a one or leave it out")


def _thresholds(text: str) -> tuple[float, float, int]:
    """Read "0.9", or "0.95,0.80,8": at first, later, and from which step. Raises InputError for anything else."""
    try:
        numbers = [float(number) for number in text.split(",")]
        early, late, turn = numbers if len(numbers) > 1 else (*numbers, *numbers, 1.0)
    except ValueError:
        early = math.nan
    if not (early >= 0 and late >= 0 and turn >= 1 and turn == turn // 1 and early + late + turn < math.inf):
        expected = "expected a number from 0, or two and a step as in 0.95,0.80,8"
        raise InputError("canvas_threshold", f"{expected}, got {text!r}")
    return early, late, int(turn)


def make_cache_choice(kind: str, max_kv_size: int | None = None, keep: int | str | None = None) -> Cache:
    """Return the cache that flags choose; one that keeps the `system` prompt gets its length later, by `rotating`.

    Raises:
        InputError: the flags contradict each other.
    """
    if kind not in _CACHES:
        raise InputError("kv", f"expected one of {', '.join(_CACHES)}, got {kind!r}")
    if kind == "rotating" and max_kv_size is None:
        raise InputError("max_kv_size", "expected the number of tokens that a rotating cache keeps, found none")
    if kind != "rotating" and max_kv_size is not None:
        raise InputError("max_kv_size", f"expected only with kv rotating, got it with {kind}, which keeps every token")
    if max_kv_size is None:
        if keep is not None:
            raise InputError("kv_keep", f"expected with a rotating cache only, got it with {kind}, which drops nothing")
        return Cache(kind=_CACHES[kind])
    if keep in (None, SYSTEM):
        keep = _KEEP
    if not (isinstance(keep, int) or (keep.isdecimal() and len(keep) < _MOST_DIGITS)):
        raise InputError("kv_keep", f"expected a number of tokens from 0 or {SYSTEM}, got {keep[:_MOST_DIGITS]!r}")
    return rotating(max_kv_size, int(keep))


def cache_name(cache: Cache) -> str:
    """Return the name of its kind."""
    return next((name for name, kind in _CACHES.items() if kind == cache.kind), "full")


def rotating(size: int, keep: int) -> Cache:
    """Return a cache of the first `keep` and the latest tokens. Raises InputError for too small a size."""
    if not 0 <= keep < 2**32:
        raise InputError("kv_keep", f"expected a number of tokens from 0, got {keep}")
    if not keep + _LEAST_RECENT <= size < 2**32:
        expected = f"expected at least {keep + _LEAST_RECENT} tokens, of which {keep} stay for good, and less than 2^32"
        raise InputError("max_kv_size", f"{expected}, got {size}")
    return Cache(kind=CACHE_ROTATING, size=size, keep=keep)


def suit(decode: Decode, cache: Cache, spec: ModelSpec) -> Decode:
    """Return the decoder for this model, with `auto` resolved.

    Raises:
        InputError: thresholds are another model's; the model has no MASK token, no drafter or one of shorter blocks, a
            layer that cannot be cut, or no room for the window.
    """
    if decode.calibrated_on not in (None, spec.name):
        expected = f"expected thresholds of {spec.name}, found those of {decode.calibrated_on}"
        numbers = f"--entropy-threshold {decode.entropy_threshold:.4g} --position-penalty {decode.position_penalty:g}"
        raise InputError("entropy_threshold", f"{expected}; calibrate this model, or give the numbers: {numbers}")
    decode = replace(decode, calibrated_on=None)
    if decode.kind == "auto":
        decode = _resolved(decode, cache, spec)
    if decode.kind == "canvas":
        return _suit_canvas(decode, cache, spec)
    if spec.needs_canvas:
        raise InputError(
            "decode", f"expected canvas, the one decoder that {spec.name} was trained for, got {decode.kind}"
        )
    if decode.kind != "ar":
        _require_able(decode, spec)
        if not decode.reads_text:
            _require_room(decode, cache, spec)
    return decode


def _resolved(decode: Decode, cache: Cache, spec: ModelSpec) -> Decode:
    """Return the decoder that `auto` stands for. Raises InputError for fields that it does not take."""
    if spec.needs_canvas:
        return replace(decode, kind="canvas")
    has_room = decode.window is not None or _room(cache, spec) > FILL_WINDOW
    able = spec.mask_token is not None and not spec.recurrent_layers and has_room
    has_drafter = spec.drafter is not None and spec.can_take_back
    kind = "draft" if has_drafter else "diffusion" if able else "ar"
    _require_own(kind, {name: getattr(decode, name) for name in _CANVAS_FIELDS}, f"auto, which stands for {kind} here")
    return replace(decode, kind=kind)


def _require_able(decode: Decode, spec: ModelSpec) -> None:
    """Raise InputError unless the model has what a decoder of several tokens per step needs."""
    if not spec.can_take_back:
        raise InputError(
            "decode",
            f"{decode.kind} needs to take rows back, but {spec.name} has a state outside of its layers, "
            "which cannot be cut; use ar",
        )
    if decode.kind == "draft" and spec.drafter is None:
        raise InputError(
            "decode",
            "draft needs a small model of the same tokenizer or a draft head; --draft-model names it to the command "
            "that loads the model, such as serve",
        )
    if decode.kind == "draft" and (decode.num_drafts or 0) > spec.most_drafts:
        raise InputError(
            "num_draft_tokens",
            f"expected at most {spec.most_drafts}, which the draft head makes in one block, got {decode.num_drafts}",
        )
    if decode.reads_text:
        return
    if spec.recurrent_layers:
        raise InputError(
            "decode",
            f"{decode.kind} needs to reorder rows, but {spec.name} has recurrent layers "
            f"(the first is layer {spec.recurrent_layers[0]}); use ngram or ar",
        )
    if spec.mask_token is None:
        raise InputError(
            "decode",
            f"{decode.kind} needs mask-trained weights, but {spec.name} has no mask_token_id in config.json; "
            "use ngram or ar",
        )


def _require_room(decode: Decode, cache: Cache, spec: ModelSpec) -> None:
    """Raise InputError unless the session's caches hold more than a window of MASK rows."""
    window, room = decode.window or FILL_WINDOW, _room(cache, spec)
    if window >= room:
        if cache.size and decode.window is None:
            raise InputError(
                "max_kv_size", f"expected more than the {window} rows of {decode.kind}'s window, got {room}"
            )
        where = "the rotating cache keeps" if cache.size else "the model's context is"
        raise InputError("window", f"expected less than the {room} tokens that {where}, got {window}")


def _suit_canvas(decode: Decode, cache: Cache, spec: ModelSpec) -> Decode:
    """Return the decoder with the model's training. Raises InputError as `suit` does."""
    training = spec.canvas
    if training is None:
        raise InputError(
            "decode",
            f"canvas needs weights trained for block diffusion, and {spec.name} has none (no canvas_length in "
            "config.json); leave --decode out",
        )
    if spec.recurrent_layers:
        raise InputError("decode", f"canvas needs rows that see later ones, but {spec.name} has recurrent layers")
    if cache.kind not in (CACHE_UNSPECIFIED, CACHE_FULL):
        raise InputError("kv", f"expected full with canvas, got {cache_name(cache)}")
    length = decode.canvas or training.length
    least = 1 if training.is_causal else training.length
    if not least <= length <= training.length:
        expected = f"from 1 to {training.length}" if training.is_causal else f"{training.length}"
        raise InputError("canvas", f"expected {expected} places, as {spec.name} was trained, got {length}")
    if length >= spec.context:
        raise InputError("canvas", f"expected less than the model's context of {spec.context}, got {length}")
    sampler: CanvasSampling = decode.canvas_sampler or ("entropy" if training.refinement else "confidence")
    early, late, _ = decode.canvas_threshold or (0.0, 0.0, 1)
    if sampler == "confidence" and max(early, late) > 1:
        raise InputError("canvas_threshold", f"expected probabilities from 0 to 1, got {early:g} and {late:g}")
    if decode.conditioning != Decode.conditioning and not training.refinement:
        raise InputError(
            "conditioning",
            f"expected {Decode.conditioning}: steps of {spec.name} know nothing of those before but the places decided",
        )
    if decode.conditioning == "top-64" and spec.vocab_size < NUM_CANDIDATES:
        raise InputError("conditioning", f"expected exact for a vocabulary of {spec.vocab_size} tokens, got top-64")
    num_steps = training.refinement.num_steps if training.refinement else length
    if decode.canvas_steps and decode.canvas_steps > (most := max(length, num_steps)):
        raise InputError("canvas_steps", f"expected at most {most} for {length} places, got {decode.canvas_steps}")
    threshold = decode.canvas_threshold or _CANVAS_THRESHOLDS[sampler]
    if not decode.canvas_threshold and training.refinement and sampler == "entropy":
        threshold = (training.refinement.entropy_bound, training.refinement.entropy_bound, 1)
    return replace(
        decode,
        canvas=length,
        canvas_steps=decode.canvas_steps or num_steps,
        canvas_sampler=sampler,
        canvas_threshold=threshold,
        training=training,
        vocab_size=spec.vocab_size,
    )


def _room(cache: Cache, spec: ModelSpec) -> int:
    """Return the most tokens that a session's caches hold."""
    return min(spec.context, cache.size or spec.context)
