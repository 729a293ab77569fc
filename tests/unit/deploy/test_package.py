import zipfile
from importlib.metadata import Distribution, PackageNotFoundError
from io import BytesIO
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from coordinator.deploy import package as package_module
from coordinator.deploy.package import Package, files_of, installed, pins, project_at
from coordinator.deploy.trial import TriedHop, hops_of
from coordinator.sessions.waterfall import Leg, Passage, Route
from protos.brigade_pb2 import StatusReply
from tests.unit.deploy.cases import tried
from worker.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_a_file_a_pin_or_a_requirement_makes_another_version() -> None:
    ids = [
        Package("1.0", {"a.py": content}, pins).id
        for content, pins in ((b"1", "mlx==1\n"), (b"2", "mlx==1\n"), (b"1", "mlx==2\n"), (b"1", "mlx==1\n"))
    ]
    assert len(set(ids)) == 3 and ids[0] == ids[3]


def test_what_python_and_finders_leave_behind_is_no_part_of_it(tmp_path: Path) -> None:
    package = tmp_path / "worker"
    for name in ("a.py", "demo/model.safetensors", ".DS_Store", "__pycache__/a.pyc", "demo/._config.json", "x.proto"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"")
    assert [name for name, _ in files_of(package)] == ["worker/a.py", "worker/demo/model.safetensors"]


def test_the_wheel_holds_all_that_the_project_installs() -> None:
    with zipfile.ZipFile(BytesIO(installed().wheel)) as archive:
        names = archive.namelist()
        metadata = Metadata.from_email(archive.read("brigade-0.1.0.dist-info/METADATA"))
        record = archive.read("brigade-0.1.0.dist-info/RECORD").decode().splitlines()
    wanted = {"worker/demo/model.safetensors", "coordinator/api/page.html", "coordinator/deploy/remote/look.sh"}
    assert wanted <= set(names)
    assert {name.split("/")[0] for name in names} == {"protos", "worker", "coordinator", "brigade-0.1.0.dist-info"}
    assert {"mlx", "grpcio"} <= {each.name for each in metadata.requires_dist or ()}
    assert sorted(line.partition(",")[0] for line in record) == sorted(names)


class Installed(Distribution):
    """A package as its note at the installation says."""

    def __init__(self, text: str, **files: str) -> None:
        self._files = {"METADATA": f"Metadata-Version: 2.1\n{text}", **files}

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        raise NotImplementedError


def test_a_checkout_and_its_installed_copy_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_at(ROOT)
    noted = project.metadata.partition("\n")[2].replace("Name:", "Provides-Extra: plot\nName:", 1)
    noted += 'Requires-Dist: matplotlib>=3.11.2; extra == "plot"\n'
    found: list[Distribution] = [Installed(noted, **{"entry_points.txt": project.entry_points})]

    def distribution(name: str) -> Distribution:
        if not found:
            raise PackageNotFoundError(name)
        return found.pop()

    monkeypatch.setattr(package_module, "distribution", distribution)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "9"\n')  # of another package
    assert project_at(tmp_path) == project
    with pytest.raises(ConfigError, match="expected brigade to be installed here"):
        project_at(tmp_path)


def test_the_packages_that_run_here_are_pinned_and_only_those() -> None:
    there = {
        "web": Installed(
            "Name: web\nVersion: 2.0\nRequires-Dist: Sub.Package\nRequires-Dist: extra-one; extra == 'all'"
        ),
        "Sub.Package": Installed("Name: Sub.Package\nVersion: 3.1\nRequires-Dist: web"),
        "extra-one": Installed("Name: extra-one\nVersion: 1.0"),
        "local": Installed("Name: local\nVersion: 1.0+cpu"),
        "folder": Installed("Name: folder\nVersion: 1.0", **{"direct_url.json": "{}"}),
    }

    def find(name: str) -> Distribution:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    needs = ["web>=1", "local", "folder", "missing", "web; sys_platform == 'nowhere'"]
    assert pins(needs, find) == "sub-package==3.1\nweb==2.0\n"
    assert pins(["web[all]"], find) == "extra-one==1.0\nsub-package==3.1\nweb==2.0\n"


def test_a_hop_has_what_its_stage_sent_and_how_long_a_frame_was_on_the_way() -> None:
    trial = tried()
    assert trial.hops == [TriedHop("studio", "mini", 100, 1.0), TriedHop("mini", "studio", 6, 3.0)]
    assert trial.is_same and not tried(second=(7, 9)).is_same
    [leg] = trial.first.usage.legs
    [passage] = leg.passages
    alone = Leg(Route(leg.route.nodes[:1], [0]), [Passage(passage.timings[:1], passage.returned)])
    assert hops_of([alone], trial.first.statuses[:1], trial.first.statuses[:1]) == [], "one node has none"
    stayed = Leg(leg.route, [Passage(passage.timings[:1], passage.returned)])
    assert hops_of([stayed], trial.first.statuses, trial.first.statuses) == [], "one node made the whole answer"
    assert hops_of([leg, stayed], [StatusReply(), StatusReply(sent_bytes=4)], trial.first.statuses) == trial.hops
