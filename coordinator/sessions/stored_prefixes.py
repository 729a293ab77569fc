"""Prefixes on the nodes' disks: which pieces of sessions every node has, what to read, and what to write next. Pure.

A piece is what all caches hold of tokens [begin, end). Its name is a hash of the model, the kind of cache, the API
key, `begin` and tokens [0, end), keyed with a secret of this user: file names reveal no text. Pieces of one
session follow each other. Caches that cannot be cut end their pieces at snapshots.
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
        self._spans = {(piece.end, piece.begin) for piece in self._pieces.values()}  # that any of them has or had
        self._rows_that_can_be_cut = rows_that_can_be_cut
        self._pays = pays

    def pieces_to_read(self, session: Session, first: int) -> list[Piece]:
        """Return the pieces with which a session goes on from its `first` tokens; none if they hold few tokens."""
        found: dict[int, Piece] = {}  # by end, those that continue what is there
        for piece in self.pieces_of(session, session.most_reused):
            follows = first < piece.end and (piece.begin <= first or piece.begin in found)
            if follows and piece.begin % session.grid == piece.end % session.grid == 0:
                found[piece.end] = piece
        end = max(found, default=first)
        chosen: list[Piece] = []
        while end > first:
            chosen.insert(0, found[end])
            end = found[end].begin
        num_tokens = chosen[-1].end - first if chosen else 0
        return chosen if num_tokens >= _LEAST_READ and self._pays(num_tokens) else []

    def pieces_of(self, session: Session, most: int) -> list[Piece]:
        """Return the pieces of the session's first `most` tokens, by their ends."""
        hashes = self._hashes(session, {end for end, _ in self._spans if end <= most})
        names = (_name(hashes[end], begin) for end, begin in sorted(self._spans) if end <= most)
        return [piece for name in names if (piece := self._pieces.get(name))]

    def next_piece(self, session: Session) -> Piece | None:
        """Return the first piece of what a session has fed that is not stored; None if all are."""
        if session.fed <= self._rows_that_can_be_cut(session.request.cache):
            ends: Sequence[int] = range(PIECE_TOKENS, session.fed + 1, PIECE_TOKENS)
        else:
            ends = session.snapshots
        stored = [0]
        for piece in self.pieces_of(session, session.fed):
            if piece.begin in stored:
                stored.append(piece.end)
        end = next((end for end in ends if end not in stored), None)
        if end is None:
            return None
        begin = max(each for each in stored if each < end)
        return Piece(name=_name(self._hashes(session, [end])[end], begin), begin=begin, end=end)

    def add(self, piece: Piece) -> None:
        """Note that every node was given this piece."""
        self._pieces[piece.name] = piece
        self._spans.add((piece.end, piece.begin))

    def forget(self, name: bytes) -> None:
        """Note that a node has lost a piece."""
        self._pieces.pop(name, None)

    def _hashes(self, session: Session, ends: Iterable[int]) -> dict[int, bytes]:
        """Return hashes of the session's first tokens up to each of these ends."""
        cache = session.request.cache.SerializeToString(deterministic=True)
        hasher = hashlib.blake2b(key=self._key)
        hasher.update(repr((session.owner, cache)).encode())
        found, at = {}, 0
        for end in sorted(ends):
            hasher.update(array("I", session.history.tokens[at:end]).tobytes())
            found[end], at = hasher.copy().digest(), end
        return found


def _name(prefix_hash: bytes, begin: int) -> bytes:
    return hashlib.blake2b(prefix_hash + begin.to_bytes(4, "little"), digest_size=PIECE_NAME_BYTES).digest()
