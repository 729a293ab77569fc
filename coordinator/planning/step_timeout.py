"""How long a step may bring no result before a node counts as lost: by what such steps took before. Pure."""

from collections.abc import Hashable

from protos.brigade_pb2 import Frame, Sampling, Session, Window

_SILENCE_S = 6.0  # that a step may take beyond its own time
_NOISE = 1.5  # times its usual time: machines get warm, and do other things
_FIRST_S = 60.0  # the first of a kind may compile kernels and page weights in

StepKind = frozenset[Hashable]  # what a step needs kernels for


class StepTimeouts:
    """Which kinds of steps one chain has done, and how long each may take."""

    def __init__(self) -> None:
        self._done: set[Hashable] = set()
        self._traits: dict[int, StepKind] = {}  # of the session in each slot

    def kind_of(self, frame: Frame) -> StepKind:
        """The frame's kind: its sizes by powers of two, and how what it asks for is sampled and remembered.

        Takes note of the sessions that the frame opens; to be asked once per frame, in order.
        """
        for session in frame.opened:
            self._traits[session.slot] = _traits(session)
        rows = sum(len(window.tokens) + window.masks for window in frame.windows)
        kind: set[Hashable] = {("rows", rows.bit_length()), ("windows", len(frame.windows).bit_length())}
        for window in frame.windows:
            asked = _num_asked(window).bit_length()
            kind |= {(asked, trait) for trait in self._traits.get(window.slot, ())}
        return frozenset(kind) if rows else frozenset()

    def done(self, kind: StepKind) -> None:
        """A step of this kind came back."""
        self._done |= kind

    def is_known(self, kind: StepKind) -> bool:
        """Whether all that it needs has been done before."""
        return kind <= self._done

    def allowed_s(self, kind: StepKind, usual_s: float) -> float:
        """Seconds without a result after which a step of this kind, which usually takes so long, is overdue."""
        allowed_s = _SILENCE_S + _NOISE * usual_s
        return allowed_s if self.is_known(kind) else max(_FIRST_S, allowed_s)


def _num_asked(window: Window) -> int:
    return window.wanted + window.guessed


def _traits(session: Session) -> StepKind:
    """The session's cache, and every part of the sampler that it uses."""
    used = [name for name in _NAMES if getattr(session.sampling, name)]
    return frozenset([("cache", session.cache.kind), "sampler", *used])


_NAMES = [field.name for field in Sampling.DESCRIPTOR.fields if field.name != "seed"]
