"""What a node announces of itself, what its log says where it cannot, and what is taken for an announcement."""

import asyncio
import io
from importlib.metadata import PackageNotFoundError
from typing import Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import ConfigError
from worker.node import announce
from worker.node.announce import MAX_NAME, About, about, announcing
from worker.node.log import worker_log
from worker.node.network import Network


def test_a_checkout_that_is_not_installed_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> Never:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("worker.platform.installation.version", found)
    said = about("mini", Network())
    assert said.version == "not-installed"
    assert About.of_txt({key.encode(): value.encode() for key, value in said.to_txt().items()}) == said


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("mini mac", "0.1.0", r"^expected a name of at most 128 letters.*, found 'mini mac'$"),
        ("mini", "0.1.0 of mine", r"^expected a version .*, found '0.1.0-of-mine\\n'$"),
    ],
)
def test_an_odd_part_is_named(name: str, version: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "version_of", lambda package: f"{version}\n")
    with pytest.raises(ConfigError, match=told):
        about(name, Network())


async def test_every_failure_is_told_once_until_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "LOOK_EVERY_S", 0)
    failures = iter([*3 * [ConfigError("no cable")], ConfigError("no certificate"), OSError()])
    is_over, out = asyncio.Event(), io.StringIO()

    def say() -> About:
        if failure := next(failures, None):
            raise failure
        is_over.set()
        raise ConfigError("no cable")

    async with announcing(say, [], worker_log("mini", out)):
        await is_over.wait()
    told = [line.partition("(")[2].partition(")")[0] for line in out.getvalue().splitlines()]
    assert told == ["no cable", "no certificate", "OSError", "no cable"]


SOUND = {"name": "mini", "version": "0.1.0", "process": "0a1b2c3d", "fingerprint": "ab" * 32}


def of_txt(**changed: str) -> About | None:
    said = SOUND | changed
    return About.of_txt({key.encode(): value.encode() for key, value in said.items()})


def test_what_a_node_says_is_understood_and_anything_else_is_no_announcement() -> None:
    for sound in (About("mini", "0.1.0", "0a1b2c3d"), About("a.b_c-9", "0.2.0rc1+x", "00000000", "ab" * 32)):
        assert About.of_txt({key.encode(): value.encode() for key, value in sound.to_txt().items()}) == sound
        assert sound.invalid_field is None
    for changed in (
        {"name": ""}, {"name": "mini\n"}, {"name": "\x1b[31mmini"}, {"name": "mini\u202e"},
        {"name": "mini: {address: x}"}, {"name": "m" * (MAX_NAME + 1)}, {"version": "0.1.0\r\n"}, {"version": ""},
        {"process": "0a1b2c3d0a1b2c3d"}, {"fingerprint": "AB" * 32}, {"fingerprint": "ab" * 31},
    ):  # fmt: skip
        assert of_txt() is not None
        assert of_txt(**changed) is None, changed
    assert About.of_txt({}) is None
    assert About.of_txt({b"name": None, b"version": b"0.1.0", b"process": b"0a1b2c3d"}) is None


@given(st.dictionaries(st.sampled_from([key.encode() for key in SOUND]), st.binary(max_size=255)))
def test_whatever_comes_is_refused_or_plain(properties: dict[bytes, bytes | None]) -> None:
    about = About.of_txt(properties)
    assert about is None or all(part.isascii() and part.isprintable() for part in about.to_txt().values())
