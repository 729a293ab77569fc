"""Prefixes on the nodes' disks: all nodes end, others begin, and a prompt goes on where it was, with equal tokens."""

import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.decoding.decode_options import Decode, make_cache_choice
from coordinator.engine.caller import KEY_DIGEST
from coordinator.engine.engine import Engine
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Goal
from coordinator.sessions import session, stored_prefixes
from protos.brigade_pb2 import Frame, PrefixesRequest
from tests.integration.conftest import Models, deployed, opened, running, serving, warmed_by_a_row
from tests.integration.many import Live, request, solo, tokens_of, until
from tests.integration.many import frames as frames
from tests.integration.test_prefixes import rows_fed
from tests.integration.windows import MASKED
from tools.joined import joined
from tools.model_types.make import make_type
from worker.errors import FrameError, PrefixLost
from worker.node.prefix_store import list_prefixes, read_piece

pytestmark = pytest.mark.usefixtures("in_turns")

LONG = {"max_position_embeddings": 4096}
WIDE: dict[str, Any] = {"config": {"mask_token_id": 90, "head_dim": 32} | LONG, "sharpen": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "full": ("qwen3", {"config": MASKED["config"] | LONG}, make_cache_choice("full", None)),
    "int8": ("qwen3", WIDE, make_cache_choice("int8", None)),
    "int4": ("qwen3", WIDE, make_cache_choice("int4", None)),
    "rotating": ("qwen3", {"config": MASKED["config"] | LONG}, make_cache_choice("rotating", 75)),
    "sliding": ("gemma3_text", {"config": LONG}, make_cache_choice("full", None)),
    "mla": ("deepseek_v3", LONG, make_cache_choice("full", None)),
    "recurrent": ("qwen3_5", {}, make_cache_choice("full", None)),
    "mixed": ("nemotron_h", {}, make_cache_choice("full", None)),
}
RARE = ("int4", "rotating", "mla", "mixed")  # "recurrent" has layers of attention, too
TINY = ("qwen3", "gemma3_text")
PIECE, CHUNK = 128, 64  # tokens
TEXT, ENDS = tokens_of(300), (75, 225, 297)
MOST = 64 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all nodes of this process keep prefixes, in small pieces: their files tell the layers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stored_prefixes, "PIECE_TOKENS", PIECE)
    monkeypatch.setattr(session, "LEAST_SAVED", PIECE // 2)
    monkeypatch.setattr(ChainCosts, "pays_to_read", lambda costs, num_tokens: True)  # however slow the disk is
    return tmp_path / "brigade" / "prompts"


def model_of(models: Models, tmp_path: Path, family: str, arguments: dict[str, Any]) -> Path:
    return (
        models(family, **arguments).folder
        if family in TINY
        else make_type(tmp_path / family, family, changes=arguments)
    )


@asynccontextmanager
async def keeping(
    folder: Path, layers: Sequence[int], most: int = MOST, goal: Goal = "latency"
) -> AsyncIterator[Chain]:
    """A chain of fresh nodes that keep prefixes on disk."""
    async with (
        serving(len(layers) - 1) as nodes,
        deployed(folder, layers, nodes, goal=goal) as deployment,
        AsyncExitStack() as stack,
    ):
        with warmed_by_a_row() if goal == "latency" else nullcontext():  # prompts apart are judged by measured costs
            chain = await stack.enter_async_context(joined(replace(deployment, prefix_bytes=most)))
        yield chain


async def kept(folder: Path, layers: Sequence[int], *asked: Any, most: int = MOST, goal: Goal = "latency") -> Any:
    """Have fresh nodes answer these requests one after another, and write what they keep."""
    async with keeping(folder, layers, most, goal) as chain, Engine(chain) as engine:
        found = [await engine.answer(each, chunk=CHUNK) for each in asked]
    for thread in threading.enumerate():
        if thread.name.startswith("prefixes"):  # a process ends after them
            thread.join(10)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.matrix if kind in RARE else ()) for kind in KINDS]
)
async def test_after_a_restart_only_what_is_behind_the_deepest_piece_is_fed(
    models: Models, tmp_path: Path, frames: list[Frame], kind: str
) -> None:
    """Another split reads it too, where each node has the layers; then the text goes on and is kept again."""
    family, arguments, cache = KINDS[kind]
    model = model_of(models, tmp_path, family, arguments)
    asked = [
        request(TEXT, 9, cache=cache, turn_ends=ENDS),
        request((*TEXT, *tokens_of(50, 3)), 9, cache=cache, seed=3, temperature=0.8, turn_ends=(*ENDS, 347)),
        request((*TEXT[:262], *tokens_of(20, 4)), 9, cache=cache),
    ]
    first, second = ((1, 3), (1, 2, 1)) if family in TINY else ((2, 4), (2, 2, 2))
    can_be_cut = kind in ("full", "int8", "int4", "mla")
    [before] = await kept(model, first, asked[0])
    frames.clear()
    [again] = await kept(model, second, asked[0])
    assert again.tokens == before.tokens
    num_read = 2 * PIECE if can_be_cut else 297
    assert again.usage.num_reused == num_read
    assert rows_fed([f for f in frames if not any(w.stored for w in f.windows)][3:]) == again.usage.num_rows
    assert again.usage.num_rows == len(TEXT) - num_read + len(again.tokens) - 1
    found = await kept(model, second, asked[1])
    found += await kept(model, second, *asked[1:])
    async with running(model, (sum(second),)) as chain:
        alone = await solo(chain, asked, chunk=CHUNK)
    assert [each.tokens for each in found] == [alone[1].tokens, alone[1].tokens, alone[2].tokens]
    assert [each.usage.num_reused for each in found] == ([256, 256, 262] if can_be_cut else [297, 347, 225])


def files_of(folder: Path, pattern: str = "*.rows") -> list[Path]:
    return sorted(folder.glob(pattern))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


@pytest.mark.parametrize("kind", ["full", "recurrent"])
async def test_a_piece_that_begins_within_what_memory_holds_is_read_only_where_that_can_be_cut(
    models: Models, tmp_path: Path, kind: str
) -> None:
    """The end of a turn was skipped at first, so near the last one, and is in memory after a restart."""
    family, arguments, cache = KINDS[kind]
    model, layers = model_of(models, tmp_path, family, arguments), (1, 3) if kind == "full" else (2, 4)
    text = tokens_of(300)
    whole = request(text, 9, cache=cache, turn_ends=(140, 170, 280))
    [expected] = await kept(model, layers, whole)
    async with keeping(model, layers) as chain, Engine(chain) as engine:
        await engine.answer(request(text[:175], 3, cache=cache, turn_ends=(140, 170)), chunk=CHUNK)
        for least in (128, 170):
            found = await engine.answer(whole, chunk=CHUNK)
            assert found.tokens == expected.tokens and found.usage.num_reused >= least


async def test_a_lost_or_damaged_piece_costs_only_time(models: Models, folder: Path, frames: list[Frame]) -> None:
    model = models("qwen3", **{"config": MASKED["config"] | LONG}).folder
    asked = request(TEXT, 9)
    [expected] = await kept(model, (1, 3), asked)
    files = files_of(folder, "*-128-256-*")
    assert len(files) == 2 and len(files_of(folder)) == 4
    modes = {path.stat().st_mode & 0o777 for path in files_of(folder.parent, "**/*")}
    assert modes == {0o600, 0o700}  # the folder's own, too
    own, others = files[0].read_bytes(), files_of(folder, "*-0-128-1-4.rows")[0].read_bytes()
    damages = [own[:-1], own[:20], b"", own[:9000] + bytes([own[9000] ^ 1]) + own[9001:], others]
    async with keeping(model, (1, 3)) as chain:
        for damage in damages:
            await until(lambda: files[0].exists() and files[0].read_bytes() == own)  # written behind, again
            files[0].write_bytes(damage)
            async with Engine(chain) as engine:
                found = await engine.answer(asked, chunk=CHUNK)
            assert found.tokens == expected.tokens and found.usage.num_reused in (0, PIECE)
    [found] = await kept(model, (1, 3), asked)  # what was damaged was removed, computed and written again
    assert found.tokens == expected.tokens and found.usage.num_reused == 2 * PIECE
    assert sum(window.stored != b"" for frame in frames for window in frame.windows) >= 2 + len(damages)


async def test_nobody_else_and_no_other_model_begins_with_it(models: Models, tmp_path: Path) -> None:
    """Another key, another kind of cache, other weights of the same shape, another first token."""
    arguments: dict[str, Any] = {"config": MASKED["config"] | LONG}
    model = models("qwen3", **arguments).folder
    asked = request(TEXT, 5)
    others = [
        (model, asked, "another key"),
        (models("qwen3", seed=1, **arguments).folder, asked, ""),
        (model, request((88, *TEXT[1:]), 5), ""),
        (models("qwen3", **WIDE).folder, request(TEXT, 5, cache=make_cache_choice("int8", None)), ""),
    ]
    await kept(model, (1, 3), asked)
    for folder, other, holder in others:
        token = KEY_DIGEST.set(holder)
        try:
            [found] = await kept(folder, (1, 3), other)
        finally:
            KEY_DIGEST.reset(token)
        assert found.usage.num_reused == 0
    [found] = await kept(model, (1, 3), asked)
    assert found.usage.num_reused == 2 * PIECE


async def test_a_node_gives_and_takes_only_whole_pieces_and_takes_them_only_as_part_of_a_chain_that_keeps_some(
    models: Models, folder: Path
) -> None:
    model = models("qwen3", **{"config": MASKED["config"] | LONG}).folder
    await kept(model, (1, 3), request(TEXT, 9))
    pieces = list_prefixes(PrefixesRequest()).pieces
    [last] = [each for each in pieces if (each.begin, each.first_layer) == (PIECE, 1)]
    content = read_piece(last)
    async with serving(1) as nodes, nodes[0].reached() as peer:
        assert await peer.export_piece(last) == content
        with pytest.raises(FrameError, match=r"^worker node-1: expected a node of a chain that keeps prefixes"):
            await peer.import_piece(last, content)
        async with opened(model, (1, 3), nodes):
            with pytest.raises(FrameError, match="of a chain that keeps prefixes"):
                await peer.import_piece(last, content)
        async with deployed(model, (1, 3), nodes) as deployment, joined(replace(deployment, prefix_bytes=MOST)):
            shutil.rmtree(folder)
            with pytest.raises(PrefixLost, match=r"^worker node-1: expected a piece of a prefix on this node's disk"):
                await peer.export_piece(last)
            for damaged in (content[:-1], content[:100], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
                with pytest.raises(FrameError, match=r"^worker node-1: expected a piece as it was written"):
                    await peer.import_piece(last, damaged)
            await peer.import_piece(last, content)
            assert files_of(folder) and await peer.export_piece(last) == content


async def test_the_oldest_pieces_give_way_and_a_full_disk_takes_none(
    models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("qwen3", **{"config": MASKED["config"] | LONG}).folder
    asked = [request(tokens_of(275, seed), 3) for seed in range(3)]
    await kept(model, (1, 3), asked[0])
    size = bytes_of(folder)
    found = await kept(model, (1, 3), *asked, most=size + size // 4)
    assert bytes_of(folder) <= size + size // 2  # two stores share it here, and may find the same room at once
    assert [each.usage.num_reused for each in found] == [2 * PIECE, 0, 0]
    [found] = await kept(model, (1, 3), asked[2])
    assert found.usage.num_reused >= PIECE
    before = files_of(folder)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, free=0))
        await kept(model, (1, 3), asked[1])
    assert files_of(folder) == before
    await kept(model, (1, 3), asked[1], most=100)
    assert not bytes_of(folder)


async def test_pieces_are_written_and_read_beside_streams_and_in_windows(models: Models) -> None:
    model = models("qwen3", **{"config": MASKED["config"] | LONG}).folder
    asked = [
        request(tokens_of(175 + 25 * n, n), 12, decode, seed=n, temperature=0.4 * n)
        for n, decode in enumerate((Decode("ngram"), Decode("diffusion", 8)) * 2)
    ]
    async with running(model, (4,)) as chain:
        alone = await solo(chain, [*asked, request(tokens_of(20, 9), 100)], chunk=CHUNK)
    for _ in range(2):
        async with keeping(model, (1, 2, 1)) as chain, Engine(chain) as engine:
            stream = Live(engine, request(tokens_of(20, 9), 100))
            await stream.wait_pieces(2)
            found = [await engine.answer(each, chunk=CHUNK) for each in asked]
            assert not stream.task.done(), "beside it"
            assert [each.tokens for each in found] == [each.tokens for each in alone[:4]]
            assert (await stream.answer()).tokens == alone[4].tokens
    assert [each.usage.num_reused for each in found] == [PIECE] * 4


async def test_where_one_node_makes_the_answers_it_alone_reads_and_writes(models: Models, folder: Path) -> None:
    model = models("qwen3", **{"config": MASKED["config"] | LONG}).folder
    asked = request(TEXT, 9)
    [expected] = await kept(model, (2, 2), asked, goal="prompt")
    assert {path.name.split("-", 3)[3] for path in files_of(folder)} == {"0-4.rows"}
    [found] = await kept(model, (2, 2), asked, goal="prompt")
    assert found.tokens == expected.tokens and found.usage.num_reused == 2 * PIECE
