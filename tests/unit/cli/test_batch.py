"""What a batch tells of itself where it does not come to its end."""

import asyncio
import errno
import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from coordinator.cli import batch as batch_module
from coordinator.cli.batch import BEGIN, BatchEntry, BatchRun, key_and_status, open_answers, read_requests
from coordinator.cluster.options import cluster_options
from coordinator.cluster.progress import telling_interrupts
from coordinator.engine import engine
from coordinator.engine.engine import Engine
from coordinator.engine.stats import Stats
from tests.unit.virtual_time import VirtualTime
from worker.errors import (
    BrigadeError,
    InputError,
    NodeBusy,
    OutOfMemory,
    PoisonRequest,
    QueueFull,
    StageLost,
    WaitedTooLong,
    again,
)


class Draining:
    """An engine whose chain refuses requests for a while, and has then failed if it is given a failure."""

    def __init__(self, error: BrigadeError, until: float, failure: BrigadeError | None = None) -> None:
        self.num_tried = 0
        self.num_waiting = 0
        self.stats = Stats()
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
            raise again(self._error)
        if self.failure is not None:
            raise again(self.failure)
        return {}


@pytest.fixture
def answer_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BrigadeError, Any], tuple[Any, ...]]:
    """Runs a batch against an engine that refuses with this error for 600 s; what has come of it."""

    def answer_with(error: BrigadeError, failure: BrigadeError | None = None) -> tuple[Any, ...]:
        clock, target = VirtualTime(), tmp_path / "out.jsonl"
        engine = Draining(error, clock.now + 600, failure)
        entries = [BatchEntry(n, f"r{n}", "POST", "/v1/completions", {}) for n in range(3)]
        monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", engine.answer)
        try:
            with open_answers(target, key_and_status, BEGIN) as answers:
                run = BatchRun(cast(Engine, engine), answers, lambda num_done, num_tokens: None)
                clock.run(run.answer_all(entries))
        finally:
            assert not clock.close()
        with open_answers(target, key_and_status, BEGIN) as answers:
            return run.num_answered, run.codes, engine.num_tried, answers.known

    return answer_with


@pytest.mark.parametrize("kind", [NodeBusy, QueueFull, WaitedTooLong, StageLost])
def test_requests_wait_while_the_cluster_refuses_them(kind: type[BrigadeError], answer_with: Any) -> None:
    assert answer_with(kind("not now")) == (3, {}, 6, {"r0": 200, "r1": 200, "r2": 200})


def test_a_cluster_that_fails_for_good_ends_the_batch_without_lines(answer_with: Any, tmp_path: Path) -> None:
    with pytest.raises(StageLost, match="is gone") as failed:
        answer_with(NodeBusy("not now"), StageLost("is gone", node="mini"))
    assert failed.value.exit_code == 3 and (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_request_that_ends_chains_is_not_tried_again(answer_with: Any) -> None:
    assert answer_with(PoisonRequest("given up"))[:3] == (3, {3: 3}, 3)


def test_a_wrong_line_gets_an_answer_line_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wrong = '{torn\n\n{"custom_id": 5, "body": {}}\n{"custom_id": "a"}\n{"custom_id": "a", "body": {}}\n[]'
    options = cluster_options(None, "demo", 0)
    for end in ("", "\n"):
        source.write_text(wrong + end)
        assert asyncio.run(batch_module.run_batch(options, source, target, 8)) == 2
        lines = [json.loads(line) for line in target.read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [None, None, "a", None, None]
        assert [line["error"]["message"].partition(":")[0] for line in lines] == [f"line {n}" for n in (1, 3, 4, 5, 6)]
        assert {line["response"]["status_code"] for line in lines} == {400}
        assert {line["error"]["code"] for line in lines} == {"invalid_value"}
        assert len({line["id"] for line in lines}) == 5
    assert "has the answers to 5 of 5 requests, 5 of them with an error\n" in capsys.readouterr().err


def test_a_request_that_fails_when_it_is_answered_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def open_engine(*given: Any, **more: Any) -> AsyncIterator[Any]:
        yield type("Model", (), {"failure": None, "stats": Stats()})

    async def answer(model: Engine, body: dict[str, Any]) -> dict[str, Any]:
        raise InputError("prompt", "too long")

    monkeypatch.setattr(engine, "open_engine", open_engine)
    monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", answer)
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "url": "/v1/completions", "method": "POST", "body": {}}\n')
    options = cluster_options(None, "demo", 0)
    assert asyncio.run(batch_module.run_batch(options, tmp_path / "in.jsonl", tmp_path / "out.jsonl", 8)) == 2


def test_a_file_without_requests_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    options = cluster_options(None, "demo", 0)
    assert asyncio.run(batch_module.run_batch(options, source, tmp_path / "out.jsonl", 8)) == 0
    assert f"{source} has no requests\n" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"a note", b'{"a": 1}', b'{"id": "other', b"abc\xff", b"{}\n"])
def test_a_file_of_something_else_stays_as_it_is_even_without_a_line_end(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(InputError, match="line 1: expected the answers"), open_answers(path, key_and_status, BEGIN):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize("num_kept", [1, 5, len(BEGIN), len(BEGIN) + 9])
def test_an_answer_that_was_torn_off_is_cut_off(tmp_path: Path, num_kept: int) -> None:
    path, line = tmp_path / "answers", b'{"id": "batch_req_5", "custom_id": "a", "response": {"status_code": 200}}\n'
    for whole, known in ((line, {"a": 200}), (b"", {})):
        path.write_bytes(whole + line[:num_kept])
        with open_answers(path, key_and_status, BEGIN) as answers:
            assert answers.known == known
        assert path.read_bytes() == whole


def test_another_run_is_told_of_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    with (
        open_answers(path, key_and_status, BEGIN),
        pytest.raises(InputError, match=r"^output: \S+ is in use by another process"),
        open_answers(path, key_and_status, BEGIN),
    ):
        pass

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with (
        pytest.raises(InputError, match=r"^output: cannot write \S+: No locks available$"),
        open_answers(path, key_and_status, BEGIN),
    ):
        pass


def test_answers_are_kept_in_a_file_that_holds_nothing_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 200_000 + "\n")
    for path, why in (
        (Path(os.devnull), "expected a file"), (tmp_path / "pipe", "expected a file"), (tmp_path / "deep", "line 1")
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^output: .*{why}"), open_answers(path, key_and_status, BEGIN):
            pass


def test_a_disk_without_room_is_told_by_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_answers(tmp_path / "answers", key_and_status, BEGIN) as answers:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(InputError, match=r"^output: cannot write \S+answers: No space left on device$"):
            answers.add({})


def test_a_file_that_is_removed_while_answers_are_added_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with open_answers(path, key_and_status, BEGIN) as answers:
        answers.add({})
        path.unlink()
        with pytest.raises(InputError, match=r"^output: cannot write \S+answers: it was removed"):
            answers.add({})


def test_a_damaged_line_is_read_as_utf8_and_nothing_else(tmp_path: Path) -> None:
    """`json.loads` would take it for UTF-16 or 32, and say so."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xff\xfe{\n" + bytes(12) + b'\n\xef\xbb\xbf{"custom_id": "a", "body": {}}\n')
    *wrong, sound = read_requests(path)
    assert [entry.problem.partition("(")[2] for entry in wrong] == [
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        "Expecting value: line 1 column 1 (char 0))",
    ]
    assert sound.custom_id == "a"


def test_tokens_are_reported_before_an_answer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual: VirtualTime
) -> None:
    stats, reports = Stats(), list[tuple[int, int]]()

    async def answer(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(4):
            stats.counters["generation_tokens"].inc(5)
            await asyncio.sleep(2)
        return {}

    monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", answer)
    entries = [BatchEntry(n, f"r{n}", "POST", "/v1/completions", {}) for n in range(3)]
    with open_answers(tmp_path / "out.jsonl", key_and_status, BEGIN) as answers:
        engine = cast(Engine, type("Model", (), {"failure": None, "stats": stats}))
        virtual.run(BatchRun(engine, answers, lambda *report: reports.append(report)).answer_all(entries))
    assert [num_tokens for done, num_tokens in reports if not done and num_tokens] == [15, 15, 15, 15]
    assert [report for report in reports if report[0]] == [(1, 0)] * 3


async def test_a_batch_that_is_interrupted_tells_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, waits = tmp_path / "out.jsonl", asyncio.Event()
    entries = [BatchEntry(n, f"r{n}", "POST", "/v1/completions", {"n": n}) for n in range(4)]
    stats = Stats()

    async def answer(model: Engine, body: dict[str, Any]) -> dict[str, Any]:
        stats.counters["generation_tokens"].inc(5)
        if body["n"] == 3:
            waits.set()
            await asyncio.Event().wait()
        if body["n"] == 2:
            raise OutOfMemory("no memory")
        return {}

    monkeypatch.setitem(batch_module.ROUTES, "/v1/completions", answer)
    with open_answers(target, key_and_status, BEGIN) as answers:
        engine = cast(Engine, type("Model", (), {"failure": None, "stats": stats}))
        run = BatchRun(engine, answers, lambda num_done, num_tokens: None)

        async def work() -> None:
            with telling_interrupts(partial(run.interrupted, target)):
                await run.answer_all(entries)

        task = asyncio.create_task(work())
        await waits.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    said = capsys.readouterr().err
    assert said.startswith(f"interrupted: 3 requests answered, 1 of them with an error in {target}: 20 tokens in ")
    assert said.endswith("the same command continues with the others\n")
    with open_answers(target, key_and_status, BEGIN) as answers:
        assert answers.known == {"r0": 200, "r1": 200, "r2": 503}
    assert len([json.loads(line) for line in target.read_text().splitlines()]) == 3
