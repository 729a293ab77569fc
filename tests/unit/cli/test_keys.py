"""`brigade keys`: a certificate has the role that cluster.yaml gives its node, and none is replaced unnoticed."""

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command
from worker.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("coordinator: {name: studio}\nworkers: [{name: mini, address: '127.0.0.1:50070'}]\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["studio"], "expected --coordinator for 'studio', which is the coordinator in "),
        (["mini", "--coordinator"], "expected no --coordinator for 'mini', which is a worker in "),
    ],
)
def test_no_certificate_has_another_role_than_its_node(
    brigade: Command, config: Path, arguments: list[str], message: str
) -> None:
    brigade("keys", "init", "--config", str(config))
    keys = config.parent / "keys"
    (keys / "studio.pem").unlink()
    with pytest.raises(ConfigError) as refused:
        brigade("keys", "issue", *arguments, "--config", str(config))
    assert refused.value.message == f"{message}{config}"
    assert [file.name for file in keys.iterdir()] == ["authority.key"]
    brigade("keys", "issue", "studio", "--coordinator", "--config", str(config))
    brigade("keys", "issue", "mini", "--config", str(config))
    brigade("keys", "issue", "laptop", "--coordinator", "--config", str(config))  # of another cluster.yaml


def test_a_launched_worker_is_sent_its_certificate(
    brigade: Command, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brigade("keys", "init", "--config", str(config))
    for entry in ("", ", ssh: mini"):
        config.write_text(f"workers: [{{name: mini, address: '127.0.0.1:50070'{entry}}}]\n")
        capsys.readouterr()
        brigade("keys", "issue", "mini", "--config", str(config))
        said = capsys.readouterr().err
        assert ("copy it into" in said) == (not entry)
        assert (f"to send it, from here: brigade launch mini --config {config}\n" in said) == bool(entry)


def test_certificates_that_a_replacement_leaves_are_named(
    brigade: Command, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brigade("keys", "init", "--config", str(config))
    brigade("keys", "issue", "mini", "--config", str(config))
    keys = config.parent / "keys"
    (keys / "authority.key").unlink()
    (keys / "studio.pem").unlink()
    capsys.readouterr()
    brigade("keys", "init", "--replace", "--config", str(config))
    kept = f"kept {keys / 'mini.pem'}: not known to be of the authority that was replaced"
    assert kept in capsys.readouterr().err.splitlines()
    brigade("keys", "issue", "mini", "--config", str(config))
    capsys.readouterr()
    brigade("keys", "init", "--replace", "--config", str(config))
    assert "kept" not in capsys.readouterr().err and not (keys / "mini.pem").exists()
