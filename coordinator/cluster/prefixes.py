"""Pieces of prefixes on the disks of one chain's nodes: who has which, and how nodes get those that they lack."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import Piece, PrefixesReply, PrefixesRequest
from worker.errors import BrigadeError
from worker.node.prefix_store import PrefixStore, list_prefixes, read_piece
from worker.platform.tasks import cancel_all
from worker.platform.threads import run_in_thread

_LIST_S = 2.0  # for the pieces of all nodes
_LEAVE_S = 3.0  # for what nodes that are about to end have of running sessions


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

    async def bring(self, pieces: Sequence[Piece], within_s: float | None) -> Sequence[Piece]:
        """Give nodes what they lack of scattered pieces, one after another; return those that came in time."""
        brought: list[Piece] = []
        moving = asyncio.create_task(self._bring_each(pieces, brought))
        self.num_moving += 1
        try:
            await asyncio.wait([moving], timeout=within_s)
        finally:
            [ended] = await cancel_all(moving)  # it may have been cancelled before, with the connections of a lost node
            self.num_moving -= 1
        if isinstance(ended, Exception) and not isinstance(ended, (BrigadeError, grpc.aio.UsageError)):
            raise ended
        return brought

    async def _bring_each(self, pieces: Sequence[Piece], brought: list[Piece]) -> None:
        for piece in pieces:
            _, moves = self.scattered.get(piece.name, (piece, ()))  # another call may have been quicker
            for move in moves:
                await self._move(move)
            if self.scattered.pop(piece.name, None):
                self.whole.append(piece)
            brought.append(piece)

    async def keep_of_leaving(self, pieces: Sequence[Piece]) -> None:
        """Keep here what nodes that are about to end have of these pieces, as far as there is time."""
        names = [piece.name for piece in pieces]
        with contextlib.suppress(TimeoutError, BrigadeError):
            async with asyncio.timeout(_LEAVE_S):
                own, *others = await self._files()
                leaving = [node for node, peer in enumerate(self._peers, 1) if peer.is_draining]
                lacking = [(each, node) for node in leaving for each in others[node - 1] if each not in own]
                for piece, node in sorted(lacking, key=lambda each: each[0].end):
                    if piece.name in names:
                        await self._move(Move(node, 0, piece))

    async def _files(self) -> list[Sequence[Piece]]:
        """Return the files of all nodes, this one first, once what they are writing is there."""
        replies = await asyncio.gather(
            run_in_thread(self._list_own), *(peer.prefixes(PrefixesRequest()) for peer in self._peers)
        )
        return [reply.pieces for reply in replies]

    def _list_own(self) -> PrefixesReply:
        self._own.wait_written()
        return list_prefixes(PrefixesRequest())

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
