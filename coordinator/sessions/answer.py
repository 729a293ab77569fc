"""Answer: what came of a request, token by token. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.sessions.waterfall import Passage, Waterfall, make_waterfall
from protos.brigade_pb2 import Sample, StatusReply


@dataclass
class Answer:
    """What came of a request. Moments are nanoseconds on the coordinator's monotonic clock."""

    num_prompt: int
    started: int
    samples: list[Sample] = field(default_factory=list)
    token_times: list[int] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)  # of all frames that carried a window of it
    statuses: list[StatusReply] = field(default_factory=list)  # of every stage, at the end of the answer
    finish_reason: str = ""
    num_reused: int = 0  # leading tokens of the prompt that were in the caches already
    num_steps: int = 0  # windows that asked for tokens
    num_rows: int = 0  # of all windows

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

    def waterfall(self, offsets: Sequence[int]) -> Waterfall:
        """`offsets` of the stages' clocks, as `make_waterfall` takes them."""
        return make_waterfall(self.passages, offsets, self.started, self.token_times[-1])
