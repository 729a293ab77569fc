"""The hub, served by a real HTTP server on this machine and asked by huggingface_hub: in two processes, and in this."""

import asyncio
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import close_session, constants
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from worker.errors import ModelError
from worker.model import hub as hub_module
from worker.model.checkpoint import open_folder
from worker.model.repository import is_repository
from worker.node.loading import load_shard, open_checkpoint
from worker.platform.threads import MlxThread

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
COMMIT = "c0ffee" + 34 * "0"

# Shard [0, 2) ends in the middle of SECOND, so it needs two of the three files.
PLACES = [("embed_tokens", FIRST), ("layers.0.", FIRST), ("layers.1.self_attn", FIRST)]
PLACES += [("layers.1.", SECOND), ("layers.2.", SECOND), ("", THIRD)]

LOAD = """
import sys
from worker.platform.installation import skip_init
skip_init("mlx_lm")
from tests.integration.test_hub import print_report
from worker.errors import ModelError

try:
    print_report(sys.argv[1])
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""


@dataclass
class Hub:
    """What the server serves, and what it was asked: (method, path, Range header)."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def downloads(self) -> set[str]:
        """The files whose content was asked for in full."""
        return {path.rsplit("/")[-1] for method, path, span in self.asked if method == "GET" and span is None}

    def ranges(self) -> list[str]:
        return sorted(path.rsplit("/")[-1] for method, path, span in self.asked if span is not None)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path, self.headers["Range"]))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._send(404, b"")

    do_HEAD = do_GET

    def _describe(self, repository: str, what: str | None, revision: str | None) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what == "tree":
            entries = [{"type": "file", "path": f, "size": len(data), "oid": _etag(data)} for f, data in files.items()]
            return self._send(200, json.dumps(entries).encode())
        siblings = [{"rfilename": file} for file in files]
        return self._send(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

    def _resolve(self, repository: str, revision: str, file: str) -> None:
        if repository in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        data = self.hub.repositories[repository].get(file)
        if data is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            begin, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            return self._send(206, data[begin : end + 1], headers)
        return self._send(200, data, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def model() -> qwen3.Model:
    mx.random.seed(7)
    return qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))


@pytest.fixture(scope="module")
def folder(model: qwen3.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tensors = dict(tree_flatten(model.parameters()))
    places = {name: next(file for part, file in PLACES if part in name) for name in tensors}
    for file in {FIRST, SECOND, THIRD}:
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in tensors if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "README.md").write_text("not needed to run the model")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    small = {name: data for name, data in files.items() if name != "model.safetensors.index.json"}
    repositories = {
        "brigade/tiny": files,
        "brigade/gated": files,
        "brigade/pickled": {"config.json": files["config.json"], "pytorch_model.bin": b"\x80"},
        "brigade/unconfigured": {FIRST: files[FIRST]},
        "brigade/unindexed": small | {"onnx/model.safetensors": files[FIRST]},
    }
    with serving(Hub(repositories, gated={"brigade/gated"})) as hub:
        yield hub


Ask = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`with asking(endpoint, home, offline=False):` as if huggingface_hub had been imported with these settings."""

    @contextmanager
    def asking(endpoint: str, home: Path, *, offline: bool = False) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name, value in {
                "ENDPOINT": endpoint,
                "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
                "HF_HOME": str(home),
                "HF_HUB_CACHE": str(home / "hub"),
                "HF_XET_CACHE": str(home / "xet"),
                "HF_TOKEN_PATH": str(home / "token"),
                "HF_HUB_OFFLINE": offline,
            }.items():
                patch.setattr(constants, name, value)
            close_session()
            yield
        close_session()

    return asking


def start(script: str, argument: str, endpoint: str, home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, which asks the hub as its environment says."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = inherited | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **settings}
    command = [sys.executable, "-W", "error", "-c", script, argument]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100, check=False)


def report(model: str) -> dict[str, Any]:
    """What loading layers [0, 2) of it brings, from first to last."""
    checkpoint = open_checkpoint(model)
    before = sorted(path.name for path in checkpoint.folder.iterdir())
    progress: list[tuple[str, int, int]] = []

    async def load() -> dict[str, str]:
        thread = MlxThread()
        try:
            shard = await load_shard(checkpoint, 0, 2, thread, lambda p: progress.append((p.phase, p.done, p.total)))
            return await thread.run(shard.digests)
        finally:
            thread.close()

    digests = asyncio.run(load())
    return {
        "name": checkpoint.name, "folder": str(checkpoint.folder), "before": before, "progress": progress,
        "digests": digests, "fingerprint": checkpoint.fingerprint.SerializeToString(deterministic=True).hex(),
    }  # fmt: skip


def print_report(model: str) -> None:
    print(json.dumps(report(model)))


def refusal(model: str) -> str:
    """The message of the ModelError with which opening the model ends."""
    with pytest.raises(ModelError) as caught:
        hub_module.open_repository(model)
    assert len(str(caught.value).strip().splitlines()) <= 2
    return str(caught.value)


def of_shard(model: qwen3.Model) -> dict[str, str]:
    """Digests of what layers [0, 2) hold, taken from the whole model in memory."""
    parts = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    tensors = {name: array for name, array in tree_flatten(model.parameters()) if name.startswith(parts)}
    return {name: hashlib.blake2b(np.array(a).tobytes(), digest_size=16).hexdigest() for name, a in tensors.items()}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def test_a_repository_is_told_by_its_name() -> None:
    names = ["owner/name", "owner/name-4bit@v1.0", "demo", "/tmp/model", "a/b/c", "../x", "./x", "owner/.."]
    names += ["owner/name@..", "owner/name@a/b"]
    assert [name for name in names if is_repository(name)] == names[:2]


@dataclass
class Start:
    """A first start with an empty cache: the hub that it asked (down by now), its report, and the cache it left."""

    hub: Hub
    report: dict[str, Any]
    home: Path


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    home = tmp_path_factory.mktemp("home")
    with serving(Hub({"brigade/tiny": {path.name: path.read_bytes() for path in folder.iterdir()}})) as hub:
        process = start(LOAD, "brigade/tiny", hub.endpoint, home)
    assert process.returncode == 0, process.stderr
    return Start(hub, json.loads(process.stdout), home)


def test_a_shard_downloads_only_the_files_that_hold_its_tensors(first: Start, folder: Path, model: qwen3.Model) -> None:
    assert first.report["digests"] == of_shard(model)
    assert first.report["name"] == f"brigade/tiny@{COMMIT}"
    assert first.hub.ranges() == [FIRST, SECOND, THIRD], "each header is asked for once"
    assert first.hub.downloads() & {FIRST, SECOND, THIRD} == {FIRST, SECOND}
    assert not {FIRST, SECOND, THIRD} & set(first.report["before"]), "opening must not download weight files"
    here = {path.name for path in Path(first.report["folder"]).iterdir()}
    assert here == {path.name for path in folder.iterdir()} - {THIRD, "README.md"}
    expected = open_folder(folder).fingerprint.SerializeToString(deterministic=True).hex()
    assert first.report["fingerprint"] == expected
    for phase in ("download", "load"):  # a bar moves and ends at its total
        steps = [(done, total) for name, done, total in first.report["progress"] if name == phase]
        assert len(steps) > 1 and steps == sorted(steps) and steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "unreachable"])
def test_a_second_start_loads_the_same_shard_without_a_hub(first: Start, asking: Ask, offline: bool) -> None:
    with asking(first.hub.endpoint, first.home, offline=offline):
        second = report("brigade/tiny")
    for same in ("name", "digests", "fingerprint"):
        assert second[same] == first.report[same]


def test_a_second_start_asks_for_no_file_again_and_for_nothing_of_a_commit_that_is_in_the_cache(
    hub: Hub, asking: Ask, tmp_path: Path
) -> None:
    with asking(hub.endpoint, tmp_path):
        name = report("brigade/tiny")["name"]
        hub.asked.clear()
        report("brigade/tiny")
        assert hub.asked and not [path for _, path, _ in hub.asked if "/resolve/" in path]
        hub.asked.clear()
        assert report(name)["name"] == name
        assert not [path for _, path, _ in hub.asked if "brigade/tiny" in path]
        (kept,) = (tmp_path / "brigade").rglob("*.msgpack")
        kept.write_text("{")
        hub.asked.clear()
        hub_module.open_repository("brigade/tiny")
    assert hub.ranges() == [THIRD], "headers of files that are here are not fetched"


def test_headers_that_cannot_be_kept_are_fetched_each_time(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    (tmp_path / "brigade").touch()  # a file in the folder's place: neither read nor written
    with asking(hub.endpoint, tmp_path):
        for _ in range(2):
            hub.asked.clear()
            assert hub_module.open_repository("brigade/tiny").tensors
            assert hub.ranges()


def test_without_an_index_the_repository_s_listing_names_the_files(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(hub.endpoint, tmp_path):
        assert hub_module.open_repository("brigade/unindexed").name == f"brigade/unindexed@{COMMIT}"
    assert hub.ranges() == [FIRST, SECOND, THIRD]
    with asking(hub.endpoint, tmp_path, offline=True):
        assert hub_module.open_repository("brigade/unindexed@main").name == f"brigade/unindexed@{COMMIT}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("brigade/nothing", "no repository that you may read"),
        ("brigade/tiny@nowhere", "give a branch, tag or commit"),
        ("brigade/gated", "accept its terms at"),
        ("brigade/pickled", "convert it with mlx_lm.convert"),
        ("brigade/unconfigured", "has no config.json"),
        ("./brigade", "correct it"),
    ],
)
def test_a_repository_that_cannot_serve_is_refused_with_advice(
    hub: Hub, asking: Ask, tmp_path: Path, name: str, expected: str
) -> None:
    with asking(hub.endpoint, tmp_path):
        assert expected in refusal(name)


def test_offline_without_a_cache_is_refused_at_once(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(hub.endpoint, tmp_path, offline=True):
        message = refusal("brigade/tiny")
    assert "HF_HUB_OFFLINE is set" in message
    assert "get it online once" in message
    assert hub.asked == []


@pytest.mark.timeout(10)  # huggingface_hub's retries would take 23 s
def test_a_hub_that_is_down_is_refused_without_retries(asking: Ask, tmp_path: Path) -> None:
    with serving(Hub({})) as hub:
        pass
    with asking(hub.endpoint, tmp_path):
        assert f"{hub.endpoint} does not answer" in refusal("brigade/tiny")


@pytest.mark.timeout(10)
def test_a_hub_that_never_answers_is_given_up(asking: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub_module, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with asking(endpoint, tmp_path):
            assert f"{endpoint} does not answer" in refusal("brigade/tiny")


def test_a_weight_file_that_is_neither_here_nor_reachable_is_refused_with_advice(
    hub: Hub, asking: Ask, tmp_path: Path
) -> None:
    with asking(hub.endpoint, tmp_path):
        hub_module.open_repository("brigade/tiny")
    process = start(LOAD, "brigade/tiny", hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert process.stderr.startswith("ModelError: cannot get brigade/tiny")
    assert "HF_HUB_OFFLINE" in process.stderr
