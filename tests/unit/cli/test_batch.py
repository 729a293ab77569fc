"""What a batch tells of itself where it does not come to its end."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.cli import batch as batch_module
from coordinator.cli.batch import BatchEntry, Run, open_answers
from coordinator.cluster.progress import telling_interrupts
from coordinator.engine.engine import Engine
from worker.errors import NodeBusy


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
            raise NodeBusy("busy")
        return {"usage": {"completion_tokens": 5}}

    async def run_a_while() -> None:
        waits = asyncio.Event()
        monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", lambda *given: answer(waits, *given))
        with open_answers(target) as answers:
            fake = cast(Engine, type("Model", (), {"failure": None}))
            run = Run(fake, answers, lambda num_done, num_tokens: None)

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
