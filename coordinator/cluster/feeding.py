"""Feeding: a request as a session of one chain, and how many of its rows go into a frame there."""

from dataclasses import replace

from coordinator.cluster.chain import Chain
from coordinator.planning.costs import chunk_size
from coordinator.sessions.request import Request, room_for_answer
from coordinator.sessions.session import Session
from worker.node.parts import most_chunk_rows

_MOST_SCORED_ROWS = 64  # of a chunk: every row of it has logits for the whole vocabulary


def session_of(request: Request, chunk: int | None, chain: Chain) -> Session:
    """`chunk` is how many rows were asked for, if that was said."""
    session = Session(
        request.prompt,
        room_for_answer(request, chain.spec.context),
        request.eos,
        request.decode.make_decoder(request.eos, chain.costs.steps),
        request.repeat_guard,
        chunk=chunk_of(request, chunk, len(request.prompt), chain),
        sampling=request.sampling,
        cache=request.cache,
        score_from=request.score_from,
    )
    session.resume(request.known)
    return session


def chunk_of(request: Request, asked: int | None, num_tokens: int, chain: Chain) -> int:
    """Rows per chunk where so many tokens are to be fed."""
    most = [most_chunk_rows(chain.spec.row_bytes), replace(chain.spec, cache=request.cache).longest_chunk]
    if request.score_from is not None:
        most.append(_MOST_SCORED_ROWS)
    return min(asked or chunk_size(num_tokens, chain.costs.stages_s), *filter(None, most))
