"""What a worker says of itself on standard error."""

import asyncio
import io
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine.engine import Engine
from tests.integration.conftest import RunningNode, answer, load_request, opened, serving
from tests.integration.many import request, tokens_of, until
from worker.errors import InternalError, ModelError
from worker.model.contents import check_contents
from worker.node import attachment, lifecycle, serve
from worker.node.hop import Link
from worker.node.log import worker_log


@asynccontextmanager
async def overheard() -> AsyncIterator[tuple[RunningNode, io.StringIO]]:
    """A worker, and what it says."""
    out = io.StringIO()
    async with serving(1, out=out) as [node]:
        yield node, out


def assert_lines(out: io.StringIO, *patterns: str) -> None:
    lines = out.getvalue().splitlines()
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(f"worker node-1: {pattern}", line), line


async def test_a_worker_tells_the_life_of_its_shard_and_its_chain(folder: Path) -> None:
    shard = rf"layers \[2, 4\) of {re.escape(str(folder))}"
    async with overheard() as (node, out):
        for _ in range(2):
            async with opened(folder, (2, 2), [node]) as chain:
                await answer(chain, (1, 2, 3), 3)
            await until(lambda: not node.service.worker.attachment)
        chain_of_mine = "the chain of coordinator coordinator"
        joined, left = f"joined {chain_of_mine} as stage 1 of 2, epoch 1", f"left {chain_of_mine}"
        assert_lines(
            out,
            f"loading {shard}",
            rf"loaded {shard}: \d+\.\d MiB in \d+\.\d s",
            joined,
            left,
            f"kept {shard}",
            joined,
            left,
        )


async def test_a_node_whose_next_one_leaves_first_has_not_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator takes all off at once; whose next node was quicker waits for its own turn."""
    out, links = io.StringIO(), list[Link]()

    class NotedLink(Link):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            links.append(self)

    monkeypatch.setattr(attachment, "Link", NotedLink)
    async with serving(2, out=out) as nodes, opened(folder, (1, 1, 2), nodes) as chain:
        await answer(chain, (1, 2, 3), 3)
        [link], last = links, nodes[1].service.worker.stage
        assert last is not None
        nodes[1].thread.post(lambda: last.credit.put_nowait(0))  # ends its hop in order
        await until(lambda: link.call.done())
    await until(lambda: not any(node.service.worker.attachment for node in nodes))
    left = [line for line in out.getvalue().splitlines() if "left" in line]
    assert sorted(left) == [f"worker node-{n}: left the chain of coordinator coordinator" for n in (1, 2)]


async def test_it_tells_whom_it_refused_and_why(folder: Path) -> None:
    other = load_request(folder, 2, 4)
    other.num_layers, other.coordinator.name = 5, "max"
    async with overheard() as (node, out):
        with pytest.raises(ModelError):
            await node.load(other)
        assert_lines(out, r"refused to load for coordinator max: cannot hold \[2, 4\) of 5 layers: .*")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ModelError("no such kernel"), ModelError, "no such kernel"),
        (
            KeyError("slot"),
            InternalError,
            r"internal error: KeyError\('slot'\) at test_worker_log\.py:\d+; this is a bug",
        ),
    ],
    ids=["an error", "a bug"],
)
async def test_it_tells_why_it_left_a_chain_that_failed_and_where_a_bug_of_ours_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    async with overheard() as (node, out):
        async with opened(folder, (2, 2), [node]) as chain:
            stage = node.service.worker.stage
            assert stage is not None
            monkeypatch.setattr(stage.executor, "begin", fail)
            with pytest.raises(kind, match=f"^worker node-1: {text}$"):
                await answer(chain, (1, 2, 3), 3)
            await until(lambda: "left" in out.getvalue())  # before its coordinator ends the call
        assert re.fullmatch(f"worker node-1: left the chain of .*: {text}", out.getvalue().splitlines()[-1])
        monkeypatch.setattr(lifecycle, "check_load_request", fail)
        with pytest.raises(kind, match=f"^worker node-1: {text}$"):
            await node.load(load_request(folder, 1, 4))
    assert re.fullmatch(f"worker node-1: (refused to load .*)?{text}", out.getvalue().splitlines()[-1])


async def test_it_tells_that_a_load_was_given_up_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checking = asyncio.Event()

    async def stand_still(*arguments: object) -> None:
        checking.set()
        await asyncio.Event().wait()

    async with overheard() as (node, out):
        run_in_thread = lifecycle.run_in_thread
        monkeypatch.setattr(
            lifecycle,
            "run_in_thread",
            lambda call: stand_still() if call.func is check_contents else run_in_thread(call),
        )
        loading = asyncio.create_task(node.load(load_request(folder, 2, 4)))
        await checking.wait()
        loading.cancel()
        await until(lambda: "gave up" in out.getvalue())
    assert_lines(
        out, r"loading layers \[2, 4\) of .*", r"gave up loading layers \[2, 4\) of .*: the coordinator cancelled it"
    )


async def test_it_tells_what_it_waits_for_when_it_is_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_WORD_S", 0.05)
    async with overheard() as (node, out), opened(folder, (2, 2), [node]) as chain:
        async with Engine(chain) as engine:
            await engine.answer(request(tokens_of(20), 3))
            out.truncate(out.seek(0))
            await serve.drain(node.service)
        assert_lines(out, "draining: sessions in progress or kept: 1, at most 10 s", "drained")


def test_a_log_without_a_place_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    worker_log("mini", None).error("drained")
    assert capfd.readouterr() == ("", "")


async def test_a_failure_is_told_though_the_call_is_cancelled_before_it_is_reported(folder: Path) -> None:
    out = io.StringIO()
    async with serving(1, out=out) as [node], opened(folder, (2, 2), [node]):
        attachment = node.service.worker.attachment
        stage = attachment.stage if attachment else None
        assert attachment and stage
        node.thread.post(lambda: stage.fail(ModelError("no such kernel")))
        while stage.failure is None:
            time.sleep(0.001)  # noqa: ASYNC251 - this loop must not hear of it before the call is cancelled
        attachment.replace()
        await until(lambda: "left" in out.getvalue())
    assert out.getvalue().splitlines()[-1] == "worker node-1: left the chain of coordinator coordinator: no such kernel"
