"""`brigade keys` and what it is for: workers in processes of their own that speak to their coordinator encrypted."""

import re
import stat
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, run_here
from tests.cluster.processes import Starter, Worker, write_cluster
from tools.worker_process import free_port

PROMPT = ("--prompt", "go", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture
def config(tmp_path: Path, talker: Path) -> Path:
    """Two workers that are not there yet, and a folder of keys that is not either."""
    nodes = [(name, f"127.0.0.1:{free_port()}") for name in ("mini", "air")]
    keys = {"model": str(talker), "coordinator": "{name: studio}", "tls": "{keys: own}"}
    return write_cluster(tmp_path / "cluster.yaml", *nodes, **keys)


def make_keys(config: Path, *names: str) -> None:
    assert run_here("keys", "init", "--config", config).code == 0
    for name in names:
        assert run_here("keys", "issue", name, "--config", config).code == 0


def start_worker(start: Starter, config: Path, name: str) -> Worker:
    worker = start.worker(name, "--config", config)
    assert worker.address
    return worker


def test_a_cluster_with_keys_gives_the_answer_of_one_process(start: Starter, config: Path, talker: Path) -> None:
    make_keys(config, "mini", "air")
    for name in ("mini", "air"):
        start_worker(start, config, name)
    alone = answer_here("--model", talker, "--local", "0", *PROMPT)
    assert answer_here("--config", config, *PROMPT)["tokens"] == alone["tokens"]
    local = answer_here("--config", config, "--local", "1", *PROMPT)  # on loopback, without keys
    assert local["tokens"] == alone["tokens"]
    (config.parent / "own" / "studio.pem").unlink()
    refused = run_here("generate", "--config", config, *PROMPT)
    assert refused.code == 2 and refused.out == ""
    assert re.fullmatch(r"error: \S*/own/studio\.pem cannot be read: .*issue studio --coordinator.*\n", refused.err)


def test_keys_are_made_where_the_configuration_says_and_an_authority_is_replaced_only_if_asked_to(config: Path) -> None:
    own = config.parent / "own"
    made = run_here("keys", "init", "--config", config)
    assert made.code == 0 and made.out == ""
    assert sorted(path.name for path in own.iterdir()) == ["authority.key", "studio.pem"]
    assert all(f"next: brigade keys issue {name} --config {config}\n" in made.err for name in ("mini", "air"))
    issued = run_here("keys", "issue", "mini", "--config", config)
    assert issued.code == 0 and str(own / "mini.pem") in issued.err
    assert {stat.S_IMODE(path.stat().st_mode) for path in own.iterdir()} == {0o600}
    before = (own / "authority.key").read_bytes()
    refused = run_here("keys", "init", "--config", config)
    assert refused.code == 2 and re.match(r"error: \S*authority\.key .*--replace", refused.err)
    assert (own / "authority.key").read_bytes() == before
    assert run_here("keys", "init", "--replace", "--config", config).code == 0
    assert (own / "authority.key").read_bytes() != before
    assert sorted(path.name for path in own.iterdir()) == ["authority.key", "studio.pem"]


def test_without_a_configuration_keys_are_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_here("keys", "init")
    assert made.code == 0 and "tls: {keys: keys}" in made.err
    assert run_here("keys", "issue", "laptop", "--coordinator").code == 0
    names = sorted(path.name for path in (tmp_path / "keys").iterdir())
    assert names == ["authority.key", "coordinator.pem", "laptop.pem"]


@pytest.mark.parametrize(
    ("issued", "message"), [((), "brigade keys issue mini,"), (("mini", "--coordinator"), "the role brigade:worker")]
)
def test_a_worker_without_its_own_certificate_does_not_start(
    config: Path, issued: tuple[str, ...], message: str
) -> None:
    make_keys(config)
    assert not issued or run_here("keys", "issue", *issued, "--config", config).code == 0
    refused = run_here("--config", config, "--name", "mini", program="worker")
    assert refused.code == 2 and re.match(rf"error: \S*/mini\.pem.*{message}", refused.err), refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue",), "Missing argument 'NAME'"),
        (("issue", "10.0.0.1"), "expected a name like that of a host"),
        (("issue", "mini"), "brigade keys init makes one"),
        (("mint",), "No such command 'mint'"),
    ],
)
def test_what_no_key_can_be_made_of_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "10.0.0.1" not in arguments or run_here("keys", "init").code == 0
    refused = run_here("keys", *arguments)
    assert refused.code == 2 and re.match(f"error: .*{message}", refused.err) and refused.out == ""
