"""The certificates that workers are sent are made once."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.deploy.certificates import Authority, certificates
from worker.config import ClusterConfig, TlsConfig
from worker.node.identity import Role


def test_of_several_launches_at_once_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, is_open = Authority.make(tmp_path), threading.Event()

    def open_it(folder: Path) -> Authority:
        is_open.set()
        return authority

    monkeypatch.setattr(Authority, "open", open_it)
    said: list[str] = []
    turn = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(certificates, ClusterConfig(tls=TlsConfig(keys=str(tmp_path))), ["mini"], said.append)
        assert is_open.wait(10.0)
        made = authority.issue("mini", Role.WORKER)
        os.close(turn)
        assert asked.result(10.0) == {"mini": made.read_bytes()} and not said
