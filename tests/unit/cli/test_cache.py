"""`brigade cache`: what is kept is shown and removed, but nothing that is in use."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command
from worker.errors import BrigadeError, InputError
from worker.node.prefix_store import prefix_folder
from worker.node.weights_cache import Lease, WeightsCache

KEYS = ("ab12" * 8, "cd34" * 8)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models: layers 3 to 5, 7 and the head of one, and a part of the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = WeightsCache().folder
    for key, name in zip(KEYS, ("owner/first@1234", "second"), strict=True):
        (folder / key).mkdir(parents=True)
        (folder / key / "called").write_text(name)
    for place in ("00003", "00004", "00005", "00007", "back"):
        (folder / KEYS[0] / f"{place}-{'0' * 64}.safetensors").write_bytes(bytes(1 << 20))
    (folder / KEYS[1] / f"00001-{'1' * 64}.part").write_bytes(bytes(100))
    return folder


@pytest.mark.parametrize("name", ["owner/first", "owner/first@1234", KEYS[0], KEYS[0][:8]])
def test_a_model_is_found_by_name(brigade: Command, kept: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    brigade("cache", "rm", name)
    assert capsys.readouterr().out == "removed 3-5, 7, head of owner/first@1234, 5.0 MiB\n"
    assert [path.name for path in kept.iterdir()] == [KEYS[1]]


def test_the_last_part_of_a_name_may_do(brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / KEYS[1] / "called").write_text("/Users/anna/models/first/")
    with pytest.raises(InputError, match=r"^'first' may be any of: .*owner/first@1234"):
        brigade("cache", "rm", "first")
    (kept / KEYS[1] / "called").write_text("/Users/anna/models/second")
    brigade("cache", "rm", "second")
    assert [path.name for path in kept.iterdir()] == [KEYS[0]]


def test_the_beginning_of_several_keys_names_none_of_them(brigade: Command, kept: Path) -> None:
    (kept / KEYS[1]).rename(other := kept / f"{KEYS[0][:8]}{KEYS[1][8:]}")
    (other / "called").write_text("owner/first@1234")  # another copy of that revision
    with pytest.raises(InputError, match=r"^'ab12' may be any of: ") as refused:
        brigade("cache", "rm", "ab12")
    assert KEYS[0] in refused.value.message and other.name in refused.value.message and other.exists()


def test_what_is_in_use_stays_and_is_named(brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lease = Lease()
    used = next((kept / KEYS[0]).glob("back*"))
    lease.add(used)
    with pytest.raises(
        BrigadeError, match=r"^owner/first@1234: what a worker of this machine uses stays\. .* --stop NAME`"
    ) as refused:
        brigade("cache", "rm", "--all")
    assert refused.value.exit_code == 3
    assert used.exists() and not (kept / KEYS[1]).exists()
    lease.close()
    capsys.readouterr()
    brigade("cache", "rm", "--all", "--json")
    assert [each["model"] for each in json.loads(capsys.readouterr().out)["removed"]] == ["owner/first@1234"]
    assert not list(kept.iterdir())


def test_what_another_user_received_stays_and_is_named(
    brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def unlink_own(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == KEYS[0]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_own)
    with pytest.raises(BrigadeError, match=f"^owner/first@1234: .* another user .*{KEYS[0]}$") as refused:
        brigade("cache", "rm", "--all", "--json")
    assert refused.value.exit_code == 3
    found = json.loads(capsys.readouterr().out)
    assert [each["model"] for each in found["removed"]] == ["second"] and found["in_use"] == ["owner/first@1234"]
    assert [path.name for path in kept.iterdir()] == [KEYS[0]]


def test_the_cached_models_are_shown(brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not brigade("cache", "ls")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ab12ab12", "owner/first@1234", "3-5,", "7,", "head", "5.0", "MiB", "just", "now"] in lines
    assert any(line[:4] == ["cd34cd34", "second", "none", "whole"] for line in lines)
    brigade("cache", "ls", "--json")
    found = json.loads(capsys.readouterr().out)
    first = next(each for each in found["models"] if each["key"] == KEYS[0])
    assert found["folder"] == str(kept) and first.pop("used") > 1e9
    expected = {"model": "owner/first@1234", "layers": [3, 4, 5, 7], "bytes": (5 << 20) + 16, "in_use": False}
    assert first == {"key": KEYS[0]} | expected


def test_a_model_without_layers_is_shown_with_its_small_files(
    brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next((kept / KEYS[1]).glob("*.part")).unlink()
    (kept / KEYS[1] / "config.json").write_bytes(bytes(100))
    lease = Lease()
    lease.add(kept / KEYS[1] / "config.json")
    brigade("cache", "ls", "--json")
    second = next(each for each in json.loads(capsys.readouterr().out)["models"] if each["key"] == KEYS[1])
    assert second["used"] > 1e9 and (second["layers"], second["bytes"], second["in_use"]) == ([], 106, True)
    lease.close()
    brigade("cache", "rm", "second")
    assert [path.name for path in kept.iterdir()] == [KEYS[0]]


def test_what_this_node_keeps_of_prompts_is_shown_and_removed(
    brigade: Command, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept)  # without a configuration
    prompts = prefix_folder()
    prompts.mkdir(parents=True)
    for layers in ("0-5", "5-8"):
        (prompts / f"{KEYS[0][:32]}-0-512-{layers}.rows").write_bytes(bytes(9))
    brigade("cache", "ls", "--kind", "prompts")
    assert re.search(r" 1 +18 B ", capsys.readouterr().out)
    found = []
    for arguments in (("ls",), ("rm", "--all"), ("ls",)):
        assert not brigade("cache", *arguments, "--kind", "prompts", "--json")
        [rows] = json.loads(capsys.readouterr().out).values()
        found += rows
    assert [(row["pieces"], row["bytes"]) for row in found] == [(1, 18), (1, 18), (0, 0)]
    assert found[0]["used"] > 1e9 and found[2]["used"] is None


@pytest.mark.parametrize("arguments", [(), ("x", "--all"), ("cd3",), ("elsewhere",)])
def test_only_models_that_are_there_are_removed(brigade: Command, kept: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"expected models by name or key|nothing is kept of"):
        brigade("cache", "rm", *arguments)
    assert len(list(kept.iterdir())) == 2
