"""Workers of one host whose ports meet: each takes its own, and one of its hops."""

import json
from pathlib import Path

import pytest

from worker.config import hop_port, load_cluster
from worker.errors import ConfigError


def load(folder: Path, *addresses: object) -> None:
    workers = [{"name": f"w{number}", "address": address} for number, address in enumerate(addresses)]
    (folder / "cluster.yaml").write_text(json.dumps({"insecure": True, "workers": workers}))
    load_cluster(folder / "cluster.yaml")


@pytest.mark.parametrize(
    ("first", "second", "met"), [(50070, 60070, 60070), (40070, 50070, 50070), (60070, 40070, 50070)]
)
def test_two_workers_whose_ports_meet_are_refused_by_the_port_that_both_need(
    tmp_path: Path, first: int, second: int, met: int
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f"127.0.0.1:{first}", f"127.0.0.1:{second}")
    [line] = str(refused.value).splitlines()[1:]
    assert line.strip().startswith("workers[1].address: ") and f"both need port {met}" in line
    load(tmp_path, f"127.0.0.1:{first}", f"127.0.0.2:{second}")
    load(tmp_path, f"127.0.0.1:{first}", f"127.0.0.1:{second + 1}")


def test_each_port_has_another_one_for_hops() -> None:
    assert all(
        1 <= hop_port(port) < 2**16 and abs(hop_port(port) - port) == 10_000 for port in (1, 55535, 55536, 65535)
    )
