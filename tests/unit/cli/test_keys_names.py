"""What `keys issue` says of a name that no node has."""

from pathlib import Path

import pytest

from coordinator.cli.keys import init, issue
from worker.errors import ConfigError

CLUSTER = "tls: {keys: keys}\nworkers: [{name: mini, address: 'mini.local:50070'}]\n"


def test_a_name_that_no_node_has_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CLUSTER)
    init(replace=False, config=config)
    capsys.readouterr()
    issue("nobody", coordinator=False, config=config)
    assert f"warning: {config} has no node 'nobody', only coordinator, mini" in capsys.readouterr().err
    issue("mini", coordinator=False, config=config)
    assert "warning" not in capsys.readouterr().err


def test_a_node_is_spelled_as_its_configuration_spells_it(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CLUSTER)
    init(replace=False, config=config)
    with pytest.raises(
        ConfigError, match=r"^expected 'mini', as .*cluster\.yaml spells this node's name, found 'Mini'$"
    ):
        issue("Mini", coordinator=False, config=config)
    assert not (tmp_path / "keys" / "mini.pem").exists()
