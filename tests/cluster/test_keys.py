"""`brigade keys` and its purpose: workers in processes of their own that speak to their coordinator encrypted."""

import re
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, run_here
from tests.cluster.processes import Starter, write_cluster
from tools.worker_process import free_port

PROMPT = ("--prompt", "go", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture
def config(tmp_path: Path, talker: Path) -> Path:
    """Two workers that do not run yet, and keys that do not exist yet."""
    nodes = [(name, f"127.0.0.1:{free_port()}") for name in ("mini", "air")]
    keys = {"model": str(talker), "coordinator": "{name: studio}", "tls": "{keys: own}"}
    return write_cluster(tmp_path / "cluster.yaml", *nodes, **keys)


def make_keys(config: Path, *arguments: str) -> str:
    """Return what `brigade keys` says."""
    made = run_here("keys", *arguments, "--config", config)
    assert (made.code, made.out) == (0, ""), made.err
    return made.err


def test_a_cluster_with_keys_gives_the_answer_of_one_process(start: Starter, config: Path, talker: Path) -> None:
    make_keys(config, "init")
    for name in ("mini", "air"):
        make_keys(config, "issue", name)
        assert start.worker(name, "--config", config).address
    alone = answer_here("--model", talker, "--local", "0", *PROMPT)
    assert answer_here("--config", config, *PROMPT)["tokens"] == alone["tokens"]
    local = answer_here("--config", config, "--local", "1", *PROMPT)  # on loopback, without keys
    assert local["tokens"] == alone["tokens"]
    (config.parent / "own" / "studio.pem").unlink()
    refused = run_here("generate", "--config", config, *PROMPT)
    assert refused.code == 2 and refused.out == ""
    assert re.fullmatch(r"error: \S*/own/studio\.pem cannot be read: .*issue studio --coordinator.*\n", refused.err)


def test_a_coordinator_whose_name_no_certificate_can_carry_leaves_no_authority_and_ends_none(config: Path) -> None:
    named = config.read_text()
    config.write_text(named.replace("name: studio", "name: '7'").replace("tls: {keys: own}", ""))
    refused = run_here("keys", "init", "--config", config)
    assert refused.code == 2 and "found '7'" in refused.err and not (config.parent / "keys").exists()


def test_a_worker_without_its_certificate_does_not_start(config: Path) -> None:
    make_keys(config, "init")
    refused = run_here("--config", config, "--name", "mini", program="worker")
    assert refused.code == 2 and re.match(r"error: \S*/mini\.pem.*brigade keys issue mini,", refused.err), refused.err
