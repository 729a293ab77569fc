"""What a node says of itself, and what its log says where it cannot."""

import asyncio
import io
from importlib.metadata import PackageNotFoundError
from typing import Never

import pytest

from worker.errors import ConfigError
from worker.node import announce
from worker.node.announce import About, about, announcing
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
def test_the_part_that_cannot_be_announced_is_named(
    name: str, version: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "version_of", lambda package: f"{version}\n")
    with pytest.raises(ConfigError, match=told):
        about(name, Network())


def test_every_failure_is_told_once_until_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "_LOOK_EVERY_S", 0)
    failures = iter([*3 * [ConfigError("no cable")], ConfigError("no certificate"), OSError()])
    is_over = asyncio.Event()

    def say() -> About:
        if failure := next(failures, None):
            raise failure
        is_over.set()
        raise ConfigError("no cable")

    async def serve() -> list[str]:
        out = io.StringIO()
        async with announcing(say, [], worker_log("mini", out)):
            await is_over.wait()
        return out.getvalue().splitlines()

    said = asyncio.run(serve())
    told = [line.partition("(")[2].partition(")")[0] for line in said]
    assert told == ["no cable", "no certificate", "OSError", "no cable"]
