"""Pieces of prefixes on the disks of one chain's nodes: who has which, and how nodes get those that they lack."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import Piece, PrefixesRequest
from worker.errors import BrigadeError
from worker.node.prefix_store import PrefixStore, list_prefixes, read_piece
from worker.platform.tasks import cancel_all
from worker.platform.threads import run_in_thread

_LIST_S = 2.0  # for the pieces of all nodes
_LEAVE_S = 3.0  # for what nodes that are about to end have of running sessions
_MOST_FILES = 1 << 15  # of one node that are looked at, the latest used: more would hold up the loop


@dataclass(frozen=True)
class Move:
    """The file of a piece that goes from one node to another; nodes by their place in the chain."""

    source: int
    target: int
    piece: Piece


def moves_for(files: Sequence[Sequence[Piece]], places: Sequence[tuple[int, int]]) -> list[Move] | None:
    """Return the files that nodes lack of a piece; None if no node has a layer that one needs.

    Args:
        files: of this piece, by node.
        places: the layers [start, end) that each node needs, from the first node on.
    """
    moves = []
    for target, (at, end) in enumerate(places):
        while at < end:
            having = [
                (node == target, piece.last_layer, node, piece)
                for node, held in enumerate(files)
                for piece in held
                if piece.first_layer <= at < piece.last_layer
            ]
            if not having:
                return None
            is_there, at, source, piece = max(having, key=lambda each: each[:2])
            if not is_there:
                moves.append(Move(source, target, piece))
    return moves


class ChainPrefixes:
    """The pieces of a chain's nodes. Use it on the main loop; other threads may read its fields."""

    def __init__(self, key: bytes, own: PrefixStore, peers: Sequence[Peer], places: Sequence[tuple[int, int]]) -> None:
        """
        Args:
            key: for the names of pieces.
            own: the store of the first node.
            peers: the other nodes of the chain.
            places: the layers [start, end) of the nodes that make answers, from the first one on.
        """
        self.key = key
        self.whole: list[Piece] = []  # that all these nodes have
        self.scattered: dict[bytes, tuple[Piece, Sequence[Move]]] = {}  # by name: those that some nodes have for others
        self.num_moving = 0  # calls of `bring` that have not ended
        self._lost: set[bytes] = set()  # names of pieces that could not be moved
        self._not_kept: set[tuple[bytes, int, int]] = set()  # files, by name and layers, that could not come here
        self._turn = asyncio.Lock()  # to move a piece, which others may want, too
        self._own, self._peers, self._places = own, peers, places

    async def learn(self) -> None:
        """Learn what all nodes have. Raises BrigadeError or TimeoutError if one does not say."""
        async with asyncio.timeout(_LIST_S):
            files = await self._files()
        by_name: dict[tuple[bytes, int, int], list[list[Piece]]] = defaultdict(lambda: [[] for _ in files])
        for node, held in enumerate(files):
            for piece in held:
                by_name[piece.name, piece.begin, piece.end][node].append(piece)
        for (name, begin, end), having in by_name.items():
            piece, moves = Piece(name=name, begin=begin, end=end), moves_for(having, self._places)
            if moves:
                self.scattered[name] = piece, moves
            elif moves is not None:
                self.whole.append(piece)

    async def bring(self, pieces: Sequence[Piece], within_s: float) -> Sequence[Piece]:
        """Give nodes what they lack of scattered pieces, one after another; return those that came in time."""
        brought: list[Piece] = []
        self.num_moving += 1
        try:
            await _as_far_as_possible(self._bring_each(pieces, brought), within_s)
        finally:
            self.num_moving -= 1
        return brought

    async def _bring_each(self, pieces: Sequence[Piece], brought: list[Piece]) -> None:
        for piece in pieces:
            async with self._turn:
                _, moves = self.scattered.get(piece.name, (piece, ()))  # another call may have been quicker
                try:
                    for move in moves:
                        await self._move(move)
                except BrigadeError:
                    self._lost.add(piece.name)  # it would fail again
                if self.scattered.pop(piece.name, None) and piece.name not in self._lost:
                    self.whole.append(piece)
            if piece.name not in self._lost:
                brought.append(piece)

    async def keep_of_leaving(self, names: Collection[bytes]) -> None:
        """Keep here what nodes that are about to end have of the pieces of these names, as far as there is time."""
        if names and any(peer.is_draining for peer in self._peers):
            leaving = [node for node, peer in enumerate(self._peers, 1) if peer.is_draining]
            await _as_far_as_possible(self.gather(names, leaving), _LEAVE_S)

    async def gather(self, names: Collection[bytes], nodes: Collection[int]) -> None:
        """Keep here what these nodes, by their place in the chain, have of the pieces of these names."""
        own, *others = await self._files()
        there = {(each.name, each.first_layer, each.last_layer) for each in own}
        asked = [(node, files) for node, files in enumerate(others, 1) if node in nodes]
        wanted = [Move(node, 0, each) for node, files in asked for each in files if each.name in names]
        for move in sorted(wanted, key=lambda move: move.piece.end):
            file = (move.piece.name, move.piece.first_layer, move.piece.last_layer)
            if file not in there | self._not_kept:
                try:
                    await self._move(move)
                except BrigadeError:  # others may come
                    self._not_kept.add(file)

    async def remove(self, names: Collection[bytes]) -> None:
        """Remove the pieces of these names from all disks. Raises BrigadeError if a node does not answer."""
        await self._files(PrefixesRequest(remove_named=names))

    async def _files(self, request: PrefixesRequest | None = None) -> list[Sequence[Piece]]:
        """Return the files of all nodes, this one first, once what they are writing is there."""
        request = request or PrefixesRequest()
        own = run_in_thread(partial(list_prefixes, request))
        replies = await asyncio.gather(own, *(peer.prefixes(request) for peer in self._peers))
        return [reply.pieces[-_MOST_FILES:] for reply in replies]

    async def _move(self, move: Move) -> None:
        """Move one file. Raises BrigadeError if a node cannot read or take it."""
        if move.source:
            content = await self._peers[move.source - 1].export_piece(move.piece)
        else:
            content = await run_in_thread(partial(read_piece, move.piece))
        if move.target:
            await self._peers[move.target - 1].import_piece(move.piece, content)
        else:
            await run_in_thread(partial(self._own.add, move.piece, content))


async def _as_far_as_possible(work: Coroutine[Any, Any, None], within_s: float) -> None:
    """Do this until the time is over or a node is lost: what has not come is computed again."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=within_s)
    finally:
        [ended] = await cancel_all(task)  # the end of a connection may have cancelled it before
    if isinstance(ended, Exception) and not isinstance(ended, (BrigadeError, grpc.aio.UsageError)):
        raise ended
