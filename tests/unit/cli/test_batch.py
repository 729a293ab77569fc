"""What a batch tells of itself where it does not come to its end."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.cli import batch as batch_module
from coordinator.cli.batch import BatchEntry, BatchRun, open_answers
from coordinator.cluster.progress import telling_interrupts
from coordinator.engine.engine import Engine
from tests.unit.virtual_time import VirtualTime
from worker.errors import BrigadeError, NodeBusy, OutOfMemory, PoisonRequest, QueueFull, StageLost, WaitedTooLong


def test_whoever_interrupts_a_batch_is_told_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    entries = [BatchEntry(n, f"r{n}", "POST", "/v1/completions", {"n": n}) for n in range(4)]

    async def answer(waits: asyncio.Event, model: Engine, body: dict[str, Any]) -> dict[str, Any]:
        if body["n"] == 3:
            waits.set()
            await asyncio.Event().wait()
        if body["n"] == 2:
            raise OutOfMemory("no memory")
        return {"usage": {"completion_tokens": 5}}

    async def run_a_while() -> None:
        waits = asyncio.Event()
        monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", lambda *given: answer(waits, *given))
        with open_answers(target) as answers:
            fake = cast(Engine, type("Model", (), {"failure": None}))
            run = BatchRun(fake, answers, lambda num_done, num_tokens: None)

            async def work() -> None:
                with telling_interrupts(partial(run.interrupted, target)):
                    await run.answer_all(entries)

            task = asyncio.create_task(work())
            await waits.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

    asyncio.run(run_a_while())
    said = capsys.readouterr().err
    assert said.startswith(f"interrupted: 3 requests answered, 1 of them with an error in {target}: 10 tokens in ")
    assert said.endswith("the same command continues with the others\n")
    with open_answers(target) as answers:
        assert answers.known == {"r0": 200, "r1": 200, "r2": 503}
    assert len([json.loads(line) for line in target.read_text().splitlines()]) == 3


class Draining:
    """An engine whose chain refuses requests for a while, and has then failed if it is given a failure."""

    def __init__(self, error: BrigadeError, until: float, failure: BrigadeError | None = None) -> None:
        self.num_tried = 0
        self.num_waiting = 0
        self._error = error
        self._until = until
        self._failure = failure

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._until

    @property
    def failure(self) -> BrigadeError | None:
        return self._failure if self.is_over else None

    @property
    def chain(self) -> Any:
        return type("Chain", (), {"draining": None if self.is_over else NodeBusy("is shutting down")})

    async def answer(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        self.num_tried += 1
        if not self.is_over:
            raise self._error.again()
        if self.failure is not None:
            raise self.failure.again()
        return {"usage": {"completion_tokens": 5}}


def answer_with(engine: Draining, clock: VirtualTime, target: Path, monkeypatch: pytest.MonkeyPatch) -> BatchRun:
    entries = [BatchEntry(n, f"r{n}", "POST", "/v1/completions", {}) for n in range(3)]
    monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", engine.answer)
    try:
        with open_answers(target) as answers:
            run = BatchRun(cast(Engine, engine), answers, lambda num_done, num_tokens: None)
            clock.run(run.answer_all(entries))
    finally:
        assert not clock.close()
    return run


@pytest.mark.parametrize("kind", [NodeBusy, QueueFull, WaitedTooLong, StageLost])
def test_requests_wait_while_the_cluster_refuses_them(
    kind: type[BrigadeError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, target = VirtualTime(), tmp_path / "out.jsonl"
    engine = Draining(kind("not now"), clock.now + 600)
    run = answer_with(engine, clock, target, monkeypatch)
    assert (run.num_answered, run.codes, engine.num_tried) == (3, {}, 6)
    with open_answers(target) as answers:
        assert answers.known == {"r0": 200, "r1": 200, "r2": 200}


def test_a_cluster_that_fails_for_good_ends_the_batch_without_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, target = VirtualTime(), tmp_path / "out.jsonl"
    engine = Draining(NodeBusy("not now"), clock.now + 600, StageLost("is gone", node="mini"))
    with pytest.raises(StageLost, match="is gone") as failed:
        answer_with(engine, clock, target, monkeypatch)
    assert failed.value.exit_code == 3 and target.read_bytes() == b""


def test_a_request_that_ends_chains_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, target = VirtualTime(), tmp_path / "out.jsonl"
    engine = Draining(PoisonRequest("given up"), clock.now + 600)
    run = answer_with(engine, clock, target, monkeypatch)
    assert (run.num_answered, run.codes, engine.num_tried) == (3, {3: 3}, 3)
