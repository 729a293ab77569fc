"""Prefixes on the nodes' disks: which pieces of sessions every node has, what to read, and what to write next. Pure.

A piece is what all caches hold of tokens [begin, end). It is named by a hash, keyed with a secret of this user, of the
model, the kind of cache, the holder of the API key and tokens [0, end): whoever lists a disk learns no text from it.
Pieces of one session follow each other; one that cannot be cut anywhere has them end at its snapshots.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache, Piece
from worker.compute.header import PIECE_NAME_BYTES

PIECE_TOKENS = 512  # of a session that can be cut anywhere
_LEAST_READ = 128  # tokens: to compute fewer costs less than another frame


class StoredPrefixes:
    """The pieces that every node of a chain has, by name."""

    def __init__(
        self,
        key: bytes,
        pieces: Iterable[Piece],
        rows_that_can_be_cut: Callable[[Cache], int],
        pays: Callable[[int], bool] = lambda num_tokens: True,
    ) -> None:
        """
        Args:
            key: the secret, joined with the model's identity; at most 64 bytes.
            rows_that_can_be_cut: up to which length caches of a kind can be cut anywhere.
            pays: whether it is quicker to read the rows of so many tokens than to compute them.
        """
        self._key = key
        self._pieces = {piece.name: piece for piece in pieces}
        self._rows_that_can_be_cut = rows_that_can_be_cut
        self._pays = pays

    def pieces_for(self, session: Session) -> list[Piece]:
        """Return the pieces with which a session goes on from the tokens that its slot holds; none if few tokens."""
        first, most = session.fed, session.most_reused
        names = self._names(session, self._ends_within(first, most))
        found: dict[int, Piece] = {}  # by end, those that continue what is there
        for end, name in names.items():
            piece = self._pieces.get(name)
            follows = piece is not None and piece.end == end and (piece.begin <= first or piece.begin in found)
            if piece is not None and follows and piece.begin % session.grid == end % session.grid == 0:
                found[end] = piece
        end = max(found, default=first)
        chosen: list[Piece] = []
        while end > first:
            chosen.insert(0, found[end])
            end = found[end].begin
        num_tokens = chosen[-1].end - first if chosen else 0
        return chosen if num_tokens >= _LEAST_READ and self._pays(num_tokens) else []

    def next_piece(self, session: Session) -> Piece | None:
        """Return the first piece of an ended session that is not stored; None if all are."""
        if session.fed <= self._rows_that_can_be_cut(session.request.cache):
            ends: Sequence[int] = range(PIECE_TOKENS, session.fed + 1, PIECE_TOKENS)
        else:
            ends = session.snapshots
        names = self._names(session, {*ends, *self._ends_within(0, session.fed)})
        stored = [0, *(end for end, name in names.items() if name in self._pieces)]
        missing = next((end for end in ends if end not in stored), None)
        if missing is None:
            return None
        return Piece(name=names[missing], begin=max(end for end in stored if end < missing), end=missing)

    def add(self, piece: Piece) -> None:
        """Note that every node was given this piece."""
        self._pieces[piece.name] = piece

    def forget(self, name: bytes) -> None:
        """Note that a node has lost a piece."""
        self._pieces.pop(name, None)

    def _ends_within(self, first: int, last: int) -> set[int]:
        return {piece.end for piece in self._pieces.values() if first < piece.end <= last}

    def _names(self, session: Session, ends: Iterable[int]) -> dict[int, bytes]:
        """Return the names of the session's pieces with these ends, ascending."""
        cache = session.request.cache.SerializeToString(deterministic=True)
        hasher = hashlib.blake2b(key=self._key, digest_size=PIECE_NAME_BYTES)
        hasher.update(repr((session.owner, cache)).encode())
        names, at = {}, 0
        for end in sorted(ends):
            hasher.update(array("I", session.history.tokens[at:end]).tobytes())
            names[end], at = hasher.copy().digest(), end
        return names
