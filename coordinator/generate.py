"""One request from prompt to last token: schedule, send, receive, commit, emit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.chain import Chain
from coordinator.lengths import LENGTHS, largest_within
from coordinator.request import Request, room_for_answer
from coordinator.scheduler import Scheduler
from coordinator.session import Session
from coordinator.text import TextStream, TokenIds
from coordinator.waterfall import Passage, Waterfall, make_waterfall
from protos.brigade_pb2 import Sample, StatusReply

_SMALLEST_CHUNK = 32  # rows
_CHUNKS_PER_STAGE = 4


def chunk_size(num_prompt: int, num_stages: int) -> int:
    """Rows per prompt chunk, if the user does not say: enough chunks to keep every stage at work.

    With c chunks on n equal stages a prompt takes (c + n - 1) / (c n) of the time that one stage would take.
    """
    if num_stages == 1:
        return LENGTHS[-1]
    return largest_within(max(_SMALLEST_CHUNK, num_prompt // (_CHUNKS_PER_STAGE * num_stages)))


@dataclass
class Answer:
    """What came of a request. Moments are nanoseconds on the coordinator's monotonic clock."""

    num_prompt: int
    started: int
    samples: list[Sample] = field(default_factory=list)
    token_times: list[int] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    statuses: list[StatusReply] = field(default_factory=list)  # of every stage, at the end of the answer
    finish_reason: str = ""
    num_steps: int = 0  # frames that were asked for tokens
    num_rows: int = 0  # rows of all frames

    @property
    def tokens(self) -> list[int]:
        return [sample.token for sample in self.samples]

    @property
    def ttft_s(self) -> float:
        return (self.token_times[0] - self.started) / 1e9

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return (self.token_times[-1] - self.token_times[0]) / 1e9

    def waterfall(self, chain: Chain) -> Waterfall:
        return make_waterfall(self.passages, chain.clock_offsets, self.started, self.token_times[-1])


async def generate(
    chain: Chain,
    request: Request,
    *,
    stream: TextStream | TokenIds | None = None,
    emit: Callable[[str], None] = lambda text: None,
    chunk: int | None = None,
) -> Answer:
    """Run a checked request through the chain.

    Args:
        stream: turns tokens into text and watches for stop strings; without one the ids are the text.
        emit: takes each piece of text as it becomes final.
        chunk: rows per prompt chunk; None chooses by `chunk_size`.
    Raises:
        BrigadeError: a stage failed; nothing more will come.
    """
    stream = stream or TokenIds()
    num_stages = 1 + len(chain.peers)
    rows = chunk or chunk_size(len(request.prompt), num_stages)
    scheduler = Scheduler(max_in_flight=num_stages + 1, chunk=rows, epoch=chain.epoch)
    decoder = request.decode.make_decoder(request.eos, chain.windows)
    max_tokens = room_for_answer(request, chain.context)
    session = Session(request.prompt, max_tokens, request.eos, decoder, request.repeat_guard)
    answer = Answer(len(request.prompt), time.monotonic_ns())
    scheduler.open(session, request.sampling, request.cache)
    while session.finish_reason is None:
        for sample in await _step(chain, scheduler, answer):
            answer.samples.append(sample)
            answer.token_times.append(answer.passages[-1].returned)
            if sample.token not in request.eos:  # the end-of-sequence token has no text
                emit(stream.push(sample.token))
            if stream.is_stopped:
                session.stop()
                break  # the rest of the step lies behind the stop string
    emit(stream.finish())
    answer.statuses = await chain.statuses()  # while the caches are still there
    answer.finish_reason = session.finish_reason
    scheduler.close(session)
    await _drain(chain, scheduler)
    return answer


async def _step(chain: Chain, scheduler: Scheduler, answer: Answer) -> list[Sample]:
    """Send what can be sent, take one result in; returns the tokens that it made known."""
    was_idle, num_sent = scheduler.is_idle, 0
    while (frame := scheduler.schedule()) is not None:
        await chain.send(frame)
        num_sent += 1
    arrival = await chain.receive()
    answer.passages.append(Passage(arrival.result.timings, arrival.at))
    answer.num_steps += bool(arrival.result.samples or arrival.result.guesses)
    answer.num_rows += arrival.num_rows
    if was_idle and num_sent == 1:  # alone in the chain
        chain.windows.observe_step(arrival.num_rows, arrival.took_s)
    return [sample for _, sample in scheduler.commit(arrival.result)]


async def _drain(chain: Chain, scheduler: Scheduler) -> None:
    """Free the slot on every stage, and take in what is still on its way."""
    while (frame := scheduler.schedule()) is not None or not scheduler.is_idle:
        if frame is not None:
            await chain.send(frame)
        else:
            scheduler.commit((await chain.receive()).result)
