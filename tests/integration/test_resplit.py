"""A change of split reads only what changed: what a node holds is layers, not a range of them."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.conftest import load, load_request, serving
from tests.tiny import make_model
from worker.model.checkpoint import open_folder
from worker.model.contents import contents_of


@pytest.mark.parametrize("embeds_last", [False, True])  # True: a draft head reads the embedding there
def test_a_node_keeps_the_layers_that_it_has_when_it_is_given_others(embeds_last: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    async def two_splits() -> tuple[dict[str, int], dict[str, int]]:
        async with serving(1) as [node]:
            held = []
            for start, end in ((1, 3), (2, 4)):
                request = load_request(folder, start, end)
                request.embeds_last = embeds_last and end == 4
                await load(node, request)
                shard = node.service.worker.shard
                assert shard is not None
                held.append({name: id(array) for name, array in shard.tensors.items()})
            return held[0], held[1]

    before, after = asyncio.run(two_splits())
    assert {name.split(".")[2] for name in before if before[name] == after.get(name)} == {"2"}
    assert ("model.embed_tokens.weight" in after) == embeds_last


def test_nothing_is_kept_of_another_model_or_of_files_that_have_changed(tmp_path: Path) -> None:
    folder, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=1)

    async def reload(change: str) -> list[bool]:
        async with serving(1) as [node]:
            await load(node, load_request(folder, 1, 3))
            shard = node.service.worker.shard
            assert shard is not None
            before = shard.tensors
            if change == "another model":
                request = load_request(other, 2, 4)
            else:
                make_model(folder, seed=2)
                request = load_request(folder, 2, 4)
            request.contents.CopyFrom(contents_of(open_folder(Path(request.model))))
            await load(node, request)
            shard = node.service.worker.shard
            assert shard is not None
            return [shard.tensors[name] is before[name] for name in shard.tensors.keys() & before.keys()]

    for change in ("another model", "other files"):
        same = asyncio.run(reload(change))
        assert same and not any(same), change
