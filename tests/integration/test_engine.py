"""An engine by itself, or several in a row without sockets: what one window does wrong is its own affair."""

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import pytest

from protos.brigade_pb2 import Frame, Opening, Result, Sampling, Window
from tests.integration.conftest import CHUNK, Layers, Models, Whole
from tests.integration.many import tokens_of
from tests.integration.upstream import window_of
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.errors import FrameError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node.framing import Arrival, FrameAssembler
from worker.node.hop import pack

PROMPTS = [tokens_of(9 + 3 * number, number) for number in range(3)]


class Row:
    """Engines of consecutive shards: a frame in, the last one's result out."""

    def __init__(self, whole: Whole, layers: Sequence[int]) -> None:
        checkpoint = open_folder(whole.folder)
        bounds = [sum(layers[:number]) for number in range(len(layers) + 1)]
        shards = [Shard(checkpoint, start, end) for start, end in pairwise(bounds)]
        dtype = describe(checkpoint).dtype
        self.engines = [Executor(shard, stage, dtype, f"node-{stage}") for stage, shard in enumerate(shards)]
        self._step = 0

    def run(self, windows: Sequence[Window], **more: Sequence[Opening] | Sequence[int]) -> Result:
        self._step += 1
        arrival = Arrival(Frame(epoch=1, step=self._step, windows=windows, **more))  # type: ignore[arg-type]
        for engine in self.engines:
            output, array = engine.finish(engine.begin(arrival.header, arrival.payload, 0, 0))
            if isinstance(output, Frame):
                [found] = map(FrameAssembler(lambda frame: None).add, pack(output, array))
                assert found is not None
                arrival = found
        assert isinstance(output, Result)
        return output

    def feed(self, prompts: Sequence[Sequence[int]], samplings: dict[int, Sampling] | None = None) -> Result:
        """Open a slot per prompt and feed all of each but its last token."""
        found = samplings or {}
        opened = [Opening(slot=slot, sampling=found.get(slot)) for slot in range(len(prompts))]
        fed = [window_of(tuple(prompt[:-1]), 0, slot) for slot, prompt in enumerate(prompts)]
        return self.run(fed, opened=opened)


def last_windows() -> list[Window]:
    """The last token of each prompt, of which the next is wanted."""
    return [window_of(tuple(prompt), len(prompt) - 1, slot) for slot, prompt in enumerate(PROMPTS)]


def wrong(window: Window) -> Window:
    """The same window behind another prefix."""
    other = Window.FromString(window.SerializeToString())
    other.prefix_hash ^= 1
    return other


def tokens(result: Result) -> dict[int, int]:
    return {sample.slot: sample.token for sample in result.samples}


def failures(result: Result) -> list[tuple[int, str, str]]:
    return [(failure.slot, failure.kind, failure.node) for failure in result.failures]


splits = pytest.mark.parametrize("layers", [(4,), (1, 3), (2, 1, 1)], ids=str)


@splits
def test_a_window_on_another_prefix_fails_alone_and_its_slot_can_go_on(whole: Whole, layers: Layers) -> None:
    expected = {slot: whole.tokens(prompt, 1)[0] for slot, prompt in enumerate(PROMPTS)}
    row = Row(whole, layers)
    row.feed(PROMPTS)
    first, second, third = last_windows()
    result = row.run([first, wrong(second), third])
    assert failures(result) == [(1, "CacheMismatch", "node-0")]
    assert result.failures[0].message == f"slot 1 was to continue at {second.base} tokens but holds another prefix"
    assert tokens(result) == {0: expected[0], 2: expected[2]}
    assert tokens(row.run([second])) == {1: expected[1]}, "it is where it was on every stage"


@pytest.mark.parametrize("at", [1, 2])
def test_a_window_that_a_later_stage_cannot_take_fails_alone(whole: Whole, at: int) -> None:
    """As if that stage had lost the slot: earlier ones have computed the window's rows, which it leaves out."""
    row = Row(whole, (2, 1, 1))
    row.feed(PROMPTS)
    row.engines[at].begin(Frame(epoch=1, opened=[Opening(slot=1)]), (), 0, 0)
    result = row.run(last_windows())
    assert failures(result) == [(1, "CacheMismatch", f"node-{at}")]
    assert "only 0 tokens" in result.failures[0].message
    assert tokens(result) == {slot: whole.tokens(PROMPTS[slot], 1)[0] for slot in (0, 2)}


def test_what_comes_for_a_failed_window_while_it_is_not_known_yet_fails_as_well(whole: Whole) -> None:
    """Chunks of a prompt are in flight one behind the other; the others of their frames go on."""
    row = Row(whole, (2, 2))
    long = tokens_of(20, 7)
    row.run([window_of(long[:8], 0)], opened=[Opening(slot=0)])
    ends = (12, 16, 20)
    chunks = [window_of(long[:end], end - 4) for end in ends]
    results = [row.run([wrong(chunks[0])]), row.run([chunks[1]]), row.run([chunks[2]])]
    assert [failures(result) for result in results] == [[(0, "CacheMismatch", "node-0")]] * 3
    assert [tokens(row.run([chunk])) for chunk in chunks][-1] == {0: whole.tokens(long, 1)[0]}


@splits
def test_a_frame_all_of_whose_windows_fail_has_no_rows_and_is_answered(models: Models, layers: Layers) -> None:
    row = Row(models("qwen3"), layers)
    row.feed(PROMPTS)
    result = row.run(list(map(wrong, last_windows())))
    assert [slot for slot, _, _ in failures(result)] == [0, 1, 2]
    assert not result.samples and len(result.timings) == len(layers)


def test_a_copy_of_more_than_there_is_fails_its_own_session(whole: Whole) -> None:
    row = Row(whole, (2, 2))
    row.feed(PROMPTS)
    held = PROMPTS[0][:-1]
    longer = (*held, 5, 6, 7)
    first, *_ = last_windows()
    windows = [first, window_of(longer, len(held) + 1, 3)]
    result = row.run(windows, opened=[Opening(slot=3, fork_of=0)])
    assert failures(result) == [(3, "CacheMismatch", "node-0")]
    assert tokens(result) == {0: whole.tokens(PROMPTS[0], 1)[0]}
    assert failures(row.run([window_of((*longer, 8), len(longer), 3)])) == [(3, "CacheMismatch", "node-0")]
    row.run([], closed=[0, 1, 2, 3])
    assert [engine.num_slots for engine in row.engines] == [0, 0]


def test_a_slot_that_is_opened_again_keeps_its_buffers_unless_another_one_begins_with_its_rows(whole: Whole) -> None:
    row = Row(whole, (4,))
    held = tokens_of(300)
    row.feed([held])
    one, other = (*held[:290], 5, 6), (*held[:285], 7)
    for opened in ([], [Opening(slot=0, fork_of=0)]):
        mx.reset_peak_memory()
        assert tokens(row.run([window_of(one, 290, 0)], opened=opened)) == {0: whole.tokens(one, 1)[0]}
    assert mx.get_peak_memory() - mx.get_active_memory() < row.engines[0].cache_bytes / 4, "its rows were copied"
    windows = [window_of(held[:281], 280, 0), window_of(other, 285, 1)]
    result = row.run(windows, opened=[Opening(slot=slot, fork_of=0) for slot in range(2)])
    assert tokens(result) == {0: whole.tokens(held[:281], 1)[0], 1: whole.tokens(other, 1)[0]}
    row.run([], closed=[0, 1])
    assert row.engines[0].num_slots == 0


@splits
def test_an_error_in_sampling_ends_that_session_alone(whole: Whole, layers: Layers) -> None:
    row = Row(whole, layers)
    odd = Sampling(temperature=1.0, top_k=1 << 20)  # mlx-lm refuses more than the vocabulary has
    failed = [(1, "SamplingError", f"node-{len(layers) - 1}")]
    assert failures(row.feed(PROMPTS, {1: odd})) == failed
    result = row.run(last_windows())
    assert failures(result) == failed and "top_k" in result.failures[0].message
    assert tokens(result) == {slot: whole.tokens(PROMPTS[slot], 1)[0] for slot in (0, 2)}


def test_parameters_that_make_no_sampler_end_their_own_session(models: Models) -> None:
    result = Row(models("qwen3"), (2, 2)).feed(PROMPTS, {1: Sampling(repetition_penalty=-1.0)})
    assert failures(result) == [(1, "SamplingError", "node-0")]
    assert set(tokens(result)) == {0, 2}


def test_what_breaks_a_whole_frame_still_ends_the_stage(models: Models) -> None:
    row = Row(models("qwen3"), (4,))
    with pytest.raises(FrameError, match="slot 0 is not open"):
        row.run([window_of((5, 6), 0)])
    with pytest.raises(FrameError, match="slot 3, to be copied to slot 4, is not open"):
        row.run([], opened=[Opening(slot=4, fork_of=3)])


def test_a_bug_of_ours_is_no_failure_of_a_session(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(models("qwen3"), (4,))
    row.feed(PROMPTS)

    def fail(*anything: object, **more: object) -> None:
        raise IndexError("of ours")

    for broken in ("worker.compute.slot.Slot.fork", "worker.compute.slot.Slot.draw"):
        with monkeypatch.context() as patch, pytest.raises(IndexError, match="of ours"):
            patch.setattr(broken, fail)
            row.run(last_windows(), opened=[Opening(slot=4, fork_of=0)])


def test_a_chunk_is_waited_for_by_itself_though_the_next_has_begun(whole: Whole) -> None:
    """The next chunk writes into the caches that the first one's rows are in: it must not take part in that wait."""
    checkpoint = open_folder(whole.folder)
    engine = Executor(Shard(checkpoint, 0, 4), 0, describe(checkpoint).dtype)
    prompt = tokens_of(2 * CHUNK)
    chunks = [window_of(prompt[:CHUNK], 0), window_of(prompt, CHUNK)]
    for chunk in chunks:
        chunk.wanted = 0
    frames = [Frame(opened=[Opening(slot=0)], windows=chunks[:1]), Frame(windows=chunks[1:])]
    first, second = (engine.begin(frame, (), 0, 0) for frame in frames)
    rows = [_num_rows_written(array) for step in (first, second) for array in step.pending]
    assert rows == [CHUNK, CHUNK, 2 * CHUNK, 2 * CHUNK]
    for step in (first, second):
        engine.finish(step)


def test_targets_of_a_long_chunk_are_scored_in_blocks_of_128(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has logits for the whole vocabulary: all rows of a chunk at once would take gigabytes."""
    whole, prompt, sizes = models("qwen3"), tokens_of(301), []
    logits = Shard.logits

    def note(shard: Shard, h: mx.array) -> mx.array:
        sizes.append(h.shape[1])
        return logits(shard, h)

    monkeypatch.setattr(Shard, "logits", note)
    row = Row(whole, (1, 3))
    window = window_of(tuple(prompt[:-1]), 0, 0)
    window.targets.extend(prompt[1:])
    window.wanted = 0
    result = row.run([window], opened=[Opening(slot=0)])
    assert sizes == [128, 128, 44] and not result.failures
    rows = whole.reference.model(mx.array([prompt[:-1]]))[0].astype(mx.float32)
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    assert [score.token for score in result.scores] == list(prompt[1:])
    expected = [logprobs[at, token].item() for at, token in enumerate(prompt[1:])]
    assert [score.logprob for score in result.scores] == pytest.approx(expected, abs=1e-5)


def test_the_end_of_a_long_prompt_frees_its_chunks_buffers(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    bases: list[int] = []  # of all frames so far
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(len(bases)))
    row = Row(models("qwen3", config={"num_hidden_layers": 1}), (1,))
    for length in (40, 2100, 2100):
        prompt = tuple(at % 89 for at in range(length))
        for base in (*range(0, length - 1, 1024), length - 1, length):  # the last two: a prompt's end, and a step
            bases.append(base)
            end = min(base + 1024, length - 1) if base < length - 1 else base + 1
            window = window_of((*prompt, 7)[:end], base, 0)
            window.wanted = int(base >= length - 1)
            row.run([window], opened=[Opening(slot=0)] if not base else [])
    assert cleared == [7, 12], "with the prompt's last row, not with a chunk, a step or a short prompt"


def _num_rows_written(array: mx.array) -> int:
    return int((mx.abs(array).sum(axis=(0, 1, 3)) > 0).sum().item())
