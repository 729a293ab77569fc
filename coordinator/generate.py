"""One request from prompt to last token: schedule, send, receive, commit, emit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.chain import Chain
from coordinator.request import Request, room_for_answer
from coordinator.scheduler import Scheduler
from coordinator.session import Session
from coordinator.text import TextStream
from coordinator.waterfall import Passage, Waterfall, make_waterfall
from protos.brigade_pb2 import Sample

_LARGEST_CHUNK = 512  # rows
_SMALLEST_CHUNK = 32
_CHUNKS_PER_STAGE = 4


def chunk_size(num_prompt: int, num_stages: int) -> int:
    """Rows per prompt chunk, if the user does not say: enough chunks to keep every stage at work.

    With c chunks on n equal stages a prompt takes (c + n - 1) / (c n) of the time that one stage would take.
    """
    if num_stages == 1:
        return _LARGEST_CHUNK
    wanted = -(-num_prompt // (_CHUNKS_PER_STAGE * num_stages))
    return min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, wanted))


@dataclass
class Answer:
    """What came of a request. Moments are nanoseconds on the coordinator's monotonic clock."""

    num_prompt: int
    started: int
    samples: list[Sample] = field(default_factory=list)
    token_times: list[int] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    finish_reason: str = ""
    num_steps: int = 0  # frames that yielded a token

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
    stream: TextStream | None = None,
    emit: Callable[[str], None] = lambda text: None,
    chunk: int | None = None,
) -> Answer:
    """Run a checked request through the chain.

    Args:
        stream: turns tokens into text and watches for stop strings; None for tokens only.
        emit: takes each piece of text as it becomes final.
        chunk: rows per prompt chunk; None chooses by `chunk_size`.
    Raises:
        BrigadeError: a stage failed; nothing more will come.
    """
    num_stages = 1 + len(chain.peers)
    rows = chunk or chunk_size(len(request.prompt), num_stages)
    scheduler = Scheduler(max_in_flight=num_stages + 1, chunk=rows, epoch=chain.epoch)
    session = Session(request.prompt, room_for_answer(request, chain.context), request.eos)
    answer = Answer(len(request.prompt), time.monotonic_ns())
    scheduler.open(session, request.sampling)
    while session.finish_reason is None:
        await _step(chain, scheduler, answer)
        for sample in answer.samples[len(answer.token_times) :]:
            answer.token_times.append(answer.passages[-1].returned)
            _emit(session, sample, stream, emit)
    if stream is not None:
        emit(stream.finish())
    answer.finish_reason = session.finish_reason
    scheduler.close(session)
    await _drain(chain, scheduler)
    return answer


async def _step(chain: Chain, scheduler: Scheduler, answer: Answer) -> None:
    while (frame := scheduler.schedule()) is not None:
        await chain.send(frame)
    arrival = await chain.receive()
    answer.passages.append(Passage(arrival.result.timings, arrival.at))
    commits = scheduler.commit(arrival.result)
    answer.samples += [sample for _, sample in commits]
    answer.num_steps += bool(commits)


def _emit(session: Session, sample: Sample, stream: TextStream | None, emit: Callable[[str], None]) -> None:
    if stream is None or session.finish_reason == "stop":
        return  # the end-of-sequence token has no text
    if text := stream.push(sample.token):
        emit(text)
    if stream.is_stopped:
        session.stop()


async def _drain(chain: Chain, scheduler: Scheduler) -> None:
    """Free the slot on every stage, and take in what is still on its way."""
    while (frame := scheduler.schedule()) is not None or not scheduler.is_idle:
        if frame is not None:
            await chain.send(frame)
        else:
            scheduler.commit((await chain.receive()).result)
