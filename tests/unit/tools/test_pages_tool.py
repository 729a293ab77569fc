"""Which pages are older than the code that they measure, in a repository with a few commits."""

import os
import subprocess
from pathlib import Path

import pytest

from tools.pages import PAGES, Page, main

ROOT = Path(__file__).parents[3]
_NAMES = "bench", "clients", "faults", "serve"
BENCH, CLIENTS, FAULTS, SERVE = (next(page for page in PAGES if page.name == f"{name}.md") for name in _NAMES)


class Repository:
    """A repository in a folder, whose commits are an hour apart."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hours = 0
        self._git("init", "--quiet")

    def commit(self, *paths: str) -> None:
        self.hours += 1
        for path in paths:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.hours}\n", encoding="utf-8")
        self._git("add", ".")
        self._git("commit", "--quiet", "--message", "change")

    def _git(self, *arguments: str) -> None:
        when = f"{1_700_000_000 + 3600 * self.hours} +0000"
        own = {"GIT_COMMITTER_DATE": when, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        named = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *named, *arguments], cwd=self.root, env=os.environ | own, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_their_code_exist_and_a_page_names_its_command(page: Page) -> None:
    assert all((ROOT / path).exists() for path in (*page.code, f"docs/{page.figures or page.name}"))
    if page.name.endswith(".md"):
        text = " ".join((ROOT / "docs" / page.name).read_text(encoding="utf-8").split())
        assert page.command in text


def test_a_page_is_older_once_its_code_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = Repository(tmp_path)

    def older() -> list[str]:
        """The printed commands."""
        main(tmp_path)
        return [line for line in capsys.readouterr().out.splitlines() if line in {page.command for page in PAGES}]

    repository.commit("coordinator/bench/report.py")
    assert older() == [BENCH.command, FAULTS.command], "in no commit yet, and each command is printed once"
    repository.commit("worker/node/hop.py", "coordinator/api/app.py")
    repository.commit(*(f"docs/{page.figures or page.name}" for page in PAGES))
    assert older() == []
    repository.commit("coordinator/api/app.py")
    assert older() == [CLIENTS.command, FAULTS.command, SERVE.command]
    repository.commit("docs/serve.md", "docs/clients.md", "docs/faults.json")
    assert older() == []
    repository.commit("coordinator/bench/report.py")
    repository.commit("docs/bench.md", "docs/bench.png", "docs/faults.json")
    assert older() == [BENCH.command]
    repository.commit("docs/bench.json")
    assert older() == []
