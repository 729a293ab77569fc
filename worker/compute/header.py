"""What the windows of a frame say, and checks of headers and results from peers before these are used.

Pure: no I/O, no MLX.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import sub
from typing import Any, Self

from protos.brigade_pb2 import (
    CACHE_ROTATING,
    CONDITIONING_EXACT,
    CONDITIONING_NONE,
    CONDITIONING_TOP,
    CacheKind,
    Conditioning,
    DType,
    Frame,
    Grammar,
    Result,
    Sample,
    Score,
    Soft,
    Window,
)
from worker.errors import FrameError
from worker.model.cache_spec import MOST_SNAPSHOTS
from worker.model.model_spec import DTYPE_BYTES, MOST_DRAFTS, ModelSpec

_MOST_SLOTS = 1 << 16  # in one frame, since the event loop checks each
_MOST_SHOWN = 64  # numbers in a message
NUM_CANDIDATES = 64  # per canvas row, with CONDITIONING_TOP
PIECE_NAME_BYTES = 16
MOST_UPCOMING = 2  # pieces that a stage reads ahead
MOST_GRAMMAR = 1 << 20  # characters of a grammar
_MOST_OWNER = 64  # characters
_MOST_EOS = 64  # tokens that end an answer
_CONDITIONINGS = (CONDITIONING_NONE, CONDITIONING_EXACT, CONDITIONING_TOP)
_EXPONENTS = {  # the exponent's bits, all of which are set in NaN and infinities
    DType.DTYPE_FLOAT32: ("<u4", 0x7F800000),
    DType.DTYPE_FLOAT16: ("<u2", 0x7C00),
    DType.DTYPE_BFLOAT16: ("<u2", 0x7F80),
}
_ONE = 0x3C00  # 1.0 as float16; larger integers encode larger numbers, negative ones, infinities and NaN
_MOST_TOKENS = 1 << 24  # larger than any context or vocabulary


def num_rows(window: Window) -> int:
    """Return a window's length L: its tokens, canvas and MASK rows; 0 if its rows are on the stages' disks."""
    return 0 if window.stored else len(window.tokens) + len(window.canvas) + window.masks


def asked_rows(window: Window, first: int = 0) -> range:
    """Return the rows that the last stage samples, wanted before guessed ones, of a window from row `first` on."""
    end = first + len(window.tokens) + window.canvas_first
    return range(end - window.wanted, end + window.guessed)


def is_chunk(window: Window) -> bool:
    """Return whether the window is a chunk of a prompt, for which the last stage samples nothing."""
    return not (window.wanted or window.masks or window.canvas)


def dtype_name(dtype: DType) -> str:
    """Return a dtype's name for messages, or the number that a peer sent instead of one."""
    return DType.Name(dtype).removeprefix("DTYPE_").lower() if dtype in DType.values() else f"dtype {dtype}"


def brief(numbers: Sequence[Any]) -> str:
    """Format a list for a message; of a long one only its length."""
    return f"{numbers}" if len(numbers) <= _MOST_SHOWN else f"{len(numbers)} of them"


def check_header(frame: Frame, stage: int, hidden_size: int, dtype: DType) -> None:
    """Raise FrameError unless the frame is valid for this stage."""
    if len(frame.timings) != stage:
        raise FrameError(
            f"expected {stage} timings, one per stage passed, got {len(frame.timings)} (step {frame.step})"
        )
    for name, count in (("openings", len(frame.opened)), ("windows", len(frame.windows))):
        if count > _MOST_SLOTS:
            raise FrameError(f"expected at most {_MOST_SLOTS} {name}, got {count} (step {frame.step})")
    _check_openings(frame)
    _check_windows(frame, stage)
    _check_pieces(frame)
    rows = sum(map(num_rows, frame.windows)) if stage else 0  # tokens come in the header itself
    expected = ([1, rows, hidden_size], dtype) if rows else ([], DType.DTYPE_UNSPECIFIED)
    found = list(frame.hidden.shape), frame.hidden.dtype
    if found != expected:
        raise FrameError(
            f"expected hidden {expected[0]} {dtype_name(expected[1])} from stage {stage - 1}, "
            f"got {brief(found[0])} {dtype_name(found[1])} (step {frame.step})"
        )


@dataclass(frozen=True)
class Asked:
    """What a frame asks the last stage for, by slot; a slot with a failure may lack it."""

    answers: Mapping[int, tuple[int, ...]]  # the numbers of samples, of guesses and drafts, and of scores
    alternatives: Mapping[int, int] = field(default_factory=dict)  # the most per answer; 0 for missing slots
    soft: Mapping[int, tuple[Conditioning, int]] = field(default_factory=dict)  # conditioning, and for how many rows
    pooled: Mapping[int, int] = field(default_factory=dict)  # rows that are added up

    @classmethod
    def of(cls, frame: Frame, logprobs: Mapping[int, int]) -> Self:
        """Return what this frame asks for; `logprobs` are those of the session in each slot."""
        windows = frame.windows
        answers = {each.slot: (each.wanted, each.guessed + each.to_draft, len(each.targets)) for each in windows}
        answers |= {store.slot: (0, 0, 0) for store in frame.stores}  # a stage may fail to
        return cls(
            answers,
            {slot: count - 1 for slot in answers if (count := logprobs.get(slot))},
            {each.slot: (each.conditioning, len(each.canvas)) for each in windows if each.conditioning},
            {each.slot: each.pooled for each in windows if each.pooled},
        )


def check_result(result: Result, asked: Asked, spec: ModelSpec, node: str) -> None:
    """Raise FrameError unless the result of `node` has exactly what was asked for, tokens below the vocabulary's size.

    Numbers of the conditioning of canvases have to be finite, probabilities at most 1.
    """
    answers = result.samples, result.guesses, result.scores
    _check_counts(result, asked.answers, node)
    failed = {failure.slot for failure in result.failures}
    counts = [Counter(each.slot for each in of) for of in answers]
    for slot in set(asked.answers).union(*counts) - failed:
        expected, found = asked.answers.get(slot, (0, 0, 0)), tuple(count[slot] for count in counts)
        if expected != found:
            said = f"expected (samples, guesses, scores) {expected} for slot {slot}, got {found} (step {result.step})"
            raise FrameError(said, node=node)
    highest = max((_highest(each, asked.alternatives, node) for of in answers for each in of), default=0)
    if highest >= spec.vocab_size:
        raise FrameError(f"expected tokens below {spec.vocab_size}, got {highest} (step {result.step})", node=node)
    _check_soft(result, asked, failed, spec, node)
    _check_pooled(result, asked, failed, spec, node)


def _check_soft(result: Result, asked: Asked, failed: set[int], spec: ModelSpec, node: str) -> None:
    """Raise FrameError unless the result has exactly the expected conditioning of canvases."""
    expected = set()
    for slot, (conditioning, count) in asked.soft.items():
        is_top = conditioning == CONDITIONING_TOP
        row_bytes = 2 * NUM_CANDIDATES if is_top else spec.hidden_size * DTYPE_BYTES[spec.dtype]
        expected.add((slot, conditioning, count * row_bytes, count * 4 * NUM_CANDIDATES if is_top else 0))
    expected = {each for each in expected if each[0] not in failed}
    found = [(soft.slot, soft.conditioning, len(soft.rows), len(soft.ids)) for soft in result.soft]
    if len(found) != len(expected) or set(found) != expected:
        said = f"expected (slot, conditioning, bytes, bytes of ids) {brief(sorted(expected))}, got {brief(found)}"
        raise FrameError(f"{said} (step {result.step})", node=node)
    for soft in result.soft:
        if wrong := _wrong_numbers(soft, spec.dtype, spec.vocab_size):
            raise FrameError(f"expected {wrong} (slot {soft.slot}, step {result.step})", node=node)


def _wrong_numbers(soft: Soft, dtype: DType, vocab_size: int) -> str:
    """Return which numbers were expected and found in the conditioning; empty if they are valid."""
    import numpy as np  # slows the start of commands, and most chains never need it

    if soft.conditioning == CONDITIONING_TOP:
        if (highest := np.frombuffer(soft.ids, "<u4").max()) >= vocab_size:
            return f"tokens below {vocab_size}, got {highest}"
        is_right = np.frombuffer(soft.rows, "<u2").max() <= _ONE
        return "" if is_right else "probabilities from 0 to 1 for the next step of a canvas, got others"
    kind, exponent = _EXPONENTS[dtype]
    is_right = (np.frombuffer(soft.rows, kind) & exponent).max() < exponent
    return "" if is_right else "finite numbers for the next step of a canvas, got NaN or infinities"


def _check_pooled(result: Result, asked: Asked, failed: set[int], spec: ModelSpec, node: str) -> None:
    """Raise FrameError unless the result has exactly the expected sums of rows."""
    size = spec.hidden_size * DTYPE_BYTES[DType.DTYPE_FLOAT32]
    expected = sorted((slot, rows, size) for slot, rows in asked.pooled.items() if slot not in failed)
    found = sorted((pooled.slot, pooled.rows, len(pooled.sum)) for pooled in result.pooled)
    if found != expected:
        said = f"expected sums of (slot, rows, bytes) {brief(expected)}, got {brief(found)} (step {result.step})"
        raise FrameError(said, node=node)


def _check_counts(result: Result, asked: Mapping[int, tuple[int, ...]], node: str) -> None:
    """Raise FrameError for many more answers than expected, before each of them is checked."""
    expected = tuple(map(sum, zip(*asked.values(), strict=True))) or (0, 0, 0)
    found = len(result.samples), len(result.guesses), len(result.scores)
    if max(map(sub, found, expected)) > _MOST_SHOWN:  # for fewer, a later error names the slot
        said = f"expected (samples, guesses, scores) {expected} at most in all, got {found} (step {result.step})"
        raise FrameError(said, node=node)
    if (count := len(result.failures)) > len(asked):
        raise FrameError(f"expected at most {len(asked)} failures, got {count} (step {result.step})", node=node)


def _highest(answer: Sample | Score, alternatives: Mapping[int, int], node: str) -> int:
    """Return the highest token id of an answer and its alternatives. Raises FrameError for too many alternatives."""
    most, found = alternatives.get(answer.slot, 0), len(answer.alternatives)
    if found > most:
        raise FrameError(f"expected at most {most} alternatives for slot {answer.slot}, got {found}", node=node)
    likeliest = answer.likeliest if isinstance(answer, Sample) else 0
    return max([answer.token, likeliest, *(other.token for other in answer.alternatives)])


def _check_openings(frame: Frame) -> None:
    """Raise FrameError unless every slot is opened once, with valid cache, grammar and snapshots."""
    slots = [session.slot for session in frame.opened]
    if len(set(slots)) < len(slots):
        raise FrameError(f"expected to open a slot once, got slots {brief(slots)} (step {frame.step})")
    for session in frame.opened:
        cache, found = session.cache, f"for slot {session.slot} (step {frame.step})"
        if cache.kind not in CacheKind.values():
            raise FrameError(f"expected a known kind of cache, got {cache.kind} {found}")
        if cache.kind == CACHE_ROTATING and cache.keep >= cache.size:
            expected = f"expected to keep fewer than {cache.size} tokens of a cache of as many"
            raise FrameError(f"{expected}, got {cache.keep} {found}")
        check_grammar(session.sampling.grammar, f" {found}")
        _check_snapshots(session.snapshots, found)


def _check_snapshots(lengths: Sequence[int], found: str) -> None:
    """Raise FrameError unless there are at most `MOST_SNAPSHOTS` lengths, in ascending order."""
    if len(lengths) > MOST_SNAPSHOTS or any(a >= b for a, b in pairwise(lengths)):
        raise FrameError(f"expected at most {MOST_SNAPSHOTS} snapshots, ascending, got {brief(lengths)} {found}")


def _check_pieces(frame: Frame) -> None:
    """Raise FrameError unless what is read from disk, or written there, is well-formed and alone in the frame."""
    names = [window.stored for window in frame.windows if window.stored]
    names += [store.piece.name for store in frame.stores]
    names += [name for window in frame.windows for name in window.upcoming]
    if names and (len(frame.windows) + len(frame.stores) > 1 or len(names) > 1 + MOST_UPCOMING):
        raise FrameError(f"expected a piece of a prefix alone in its frame, got more (step {frame.step})")
    if wrong := [name for name in names if len(name) != PIECE_NAME_BYTES]:
        found = f"got {len(wrong[0])} (step {frame.step})"
        raise FrameError(f"expected {PIECE_NAME_BYTES} bytes of the name of a piece of a prefix, {found}")
    for store in frame.stores:
        if not store.piece.begin < store.piece.end <= _MOST_TOKENS:
            found = f"got [{store.piece.begin}, {store.piece.end}) (step {frame.step})"
            raise FrameError(f"expected tokens of a piece of a prefix, {found}")
    for window in frame.windows:
        is_plain = is_chunk(window) and not (window.targets or window.pooled or window.snapshots)
        if window.stored and not is_plain:
            raise FrameError(f"expected only tokens in the window of a piece of a prefix (step {frame.step})")


def check_grammar(grammar: Grammar, found: str = "") -> None:
    """Raise FrameError for a grammar that is too large; `found` ends the message with its place."""
    highest = max(grammar.eos, default=0)
    for name, most, count in (
        ("characters of a grammar", MOST_GRAMMAR, len(grammar.text)),
        ("tokens that end an answer", _MOST_EOS, len(grammar.eos)),
        ("characters of a grammar's owner", _MOST_OWNER, len(grammar.owner)),
        ("tokens before an answer", _MOST_TOKENS, grammar.begins),
        ("for a token that ends an answer", _MOST_TOKENS, highest),
    ):
        if count > most:
            raise FrameError(f"expected at most {most} {name}, got {count}{found}")


def _check_windows(frame: Frame, stage: int) -> None:
    """Raise FrameError unless each window's fields are consistent and each slot has one window."""
    slots = [window.slot for window in frame.windows]
    if len(set(slots)) < len(slots):
        raise FrameError(f"expected one window per slot, got slots {brief(slots)} (step {frame.step})")
    for window in frame.windows:
        found = f"in the window of slot {window.slot} (step {frame.step})"
        least = max(0 if window.canvas else 1, window.wanted + len(window.targets))
        if len(window.tokens) < least:
            raise FrameError(f"expected at least {least} tokens, got {len(window.tokens)} {found}")
        if window.canvas and (window.masks or window.positions or window.wanted):
            raise FrameError(f"expected no MASK rows, positions or wanted rows beside a canvas {found}")
        if window.pooled > len(window.tokens):
            raise FrameError(f"expected at most {len(window.tokens)} rows to add up, got {window.pooled} {found}")
        is_whole = window.guessed == len(window.canvas) > 0
        if window.conditioning not in _CONDITIONINGS or (window.conditioning and not is_whole):
            raise FrameError(f"expected known conditioning, and of a whole canvas, got {window.conditioning} {found}")
        if not 0 <= window.temperature < inf or (window.temperature and not window.canvas):
            raise FrameError(f"expected a temperature from 0, and of a canvas, got {window.temperature} {found}")
        if window.HasField("soft") and stage:
            raise FrameError(f"expected what the step before made of a canvas at stage 0 only, got it {found}")
        if window.canvas_first and not window.canvas:
            raise FrameError(
                f"expected no rows before the guessed ones without a canvas, got {window.canvas_first} {found}"
            )
        if window.canvas_first + window.guessed > (most := window.masks + len(window.canvas)):
            expected = f"expected at most {most} guesses, as many as MASK or canvas rows"
            raise FrameError(f"{expected}, got {window.guessed} after {window.canvas_first} {found}")
        has_room = not (window.masks or window.canvas) and window.wanted
        if window.to_draft and not (has_room and window.to_draft <= MOST_DRAFTS):
            expected = f"expected at most {MOST_DRAFTS} drafts, after sampled rows and without MASK or canvas rows"
            raise FrameError(f"{expected}, got {window.to_draft} {found}")
        if window.snapshots and not (is_chunk(window) and window.snapshots[-1] == window.base + len(window.tokens)):
            expected = "expected a snapshot of a prompt chunk only, at its end"
            raise FrameError(f"{expected}, got {brief(window.snapshots)} {found}")
        _check_snapshots(window.snapshots, found)
        if len(window.positions) not in (0, num_rows(window)):
            raise FrameError(f"expected {num_rows(window)} positions or none, got {len(window.positions)} {found}")
