"""The hub, served by a real HTTP server on this machine and asked by real processes, as huggingface_hub asks it."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from worker.model.checkpoint import open_folder
from worker.model.hub import is_repository

pytestmark = pytest.mark.timeout(30)

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
import asyncio, json, sys
from worker.errors import ModelError
from worker.node.loading import load_shard, open_checkpoint
from worker.process.mlx_thread import MlxThread

async def main():
    checkpoint = open_checkpoint(sys.argv[1])
    before = sorted(path.name for path in checkpoint.folder.iterdir())
    progress, thread = [], MlxThread()
    shard = await load_shard(checkpoint, 0, 2, 4, thread, lambda p: progress.append((p.phase, p.done, p.total)))
    digests = dict(await thread.run(lambda: list(shard.digests())))
    thread.close()
    mark = checkpoint.fingerprint.SerializeToString(deterministic=True).hex()
    print(json.dumps(dict(name=checkpoint.name, folder=str(checkpoint.folder), before=before, progress=progress,
                          digests=digests, fingerprint=mark)))
try:
    asyncio.run(main())
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""

OPEN = """
import sys, time
from worker.model import hub
from worker.errors import ModelError
hub._TIMEOUT_S = 0.5
begin = time.monotonic()
try:
    print(hub.open_repository(sys.argv[1]).name)
except ModelError as error:
    sys.exit(f"ModelError after {time.monotonic() - begin:.1f} s: {error}")
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


def start(script: str, model: str, endpoint: str, home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own: huggingface_hub reads its settings when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = inherited | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **settings}
    command = [sys.executable, "-W", "error", "-c", script, model]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=20, check=False)


def load(model: str, endpoint: str, home: Path, **settings: str) -> dict[str, Any]:
    process = start(LOAD, model, endpoint, home, **settings)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


def refusal(model: str, endpoint: str, home: Path, **settings: str) -> str:
    """The message of the ModelError with which opening the model ends; huggingface_hub's retries would take 23 s."""
    process = start(OPEN, model, endpoint, home, **settings)
    assert process.returncode == 1, process.stdout
    match = re.search(r"^ModelError after (\S+) s: (.*)\Z", process.stderr, re.MULTILINE | re.DOTALL)
    assert match, process.stderr
    assert "Traceback" not in process.stderr
    assert float(match[1]) < 10
    assert len(match[2].strip().splitlines()) <= 2
    return match[2]


def of_shard(model: qwen3.Model) -> dict[str, str]:
    """Digests of what layers [0, 2) hold, taken from the whole model in memory."""
    parts = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    tensors = {name: array for name, array in tree_flatten(model.parameters()) if name.startswith(parts)}
    return {name: hashlib.blake2b(np.array(a).tobytes(), digest_size=16).hexdigest() for name, a in tensors.items()}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [("owner/name", True), ("owner/name-4bit@v1.0", True), ("demo", False), ("/tmp/model", False), ("a/b/c", False)],
)
def test_a_repository_is_told_by_its_name(model_name: str, expected: bool) -> None:
    assert is_repository(model_name) == expected


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
        return Start(hub, load("brigade/tiny", hub.endpoint, home), home)


def test_a_shard_downloads_only_the_files_that_hold_its_tensors(first: Start, folder: Path, model: qwen3.Model) -> None:
    assert first.report["digests"] == of_shard(model)
    assert first.report["name"] == f"brigade/tiny@{COMMIT}"
    assert first.hub.ranges() == [FIRST, SECOND, THIRD], "each header is asked for once"
    assert first.hub.downloads() & {FIRST, SECOND, THIRD} == {FIRST, SECOND}
    assert not {FIRST, SECOND, THIRD} & set(first.report["before"]), "opening must not download weight files"
    here = {path.name for path in Path(first.report["folder"]).iterdir()}
    assert here == {path.name for path in folder.iterdir()} - {THIRD, "README.md"}


@pytest.mark.parametrize("phase", ["download", "load"])
def test_a_bar_moves_and_ends_at_its_total(first: Start, phase: str) -> None:
    steps = [(done, total) for name, done, total in first.report["progress"] if name == phase]
    assert len(steps) > 1
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_the_fingerprint_is_that_of_the_plain_folder(first: Start, folder: Path) -> None:
    expected = open_folder(folder).fingerprint.SerializeToString(deterministic=True).hex()
    assert first.report["fingerprint"] == expected


@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "unreachable"])
def test_a_second_start_loads_the_same_shard_without_a_hub(first: Start, settings: dict[str, str]) -> None:
    second = load("brigade/tiny", first.hub.endpoint, first.home, **settings)
    for same in ("name", "digests", "fingerprint"):
        assert second[same] == first.report[same]


def test_a_second_start_online_asks_for_no_file_again(hub: Hub, tmp_path: Path) -> None:
    load("brigade/tiny", hub.endpoint, tmp_path)
    hub.asked.clear()
    load("brigade/tiny", hub.endpoint, tmp_path)
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]


def test_a_commit_that_is_in_the_cache_is_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    name = load("brigade/tiny", hub.endpoint, tmp_path)["name"]
    hub.asked.clear()
    assert load(name, hub.endpoint, tmp_path)["name"] == name
    assert not [path for _, path, _ in hub.asked if "brigade/tiny" in path]


def test_headers_of_files_that_are_here_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    load("brigade/tiny", hub.endpoint, tmp_path)
    (kept,) = (tmp_path / "brigade").rglob("*.msgpack")
    kept.write_text("{")
    hub.asked.clear()
    assert start(OPEN, "brigade/tiny", hub.endpoint, tmp_path).returncode == 0
    assert hub.ranges() == [THIRD]


def test_without_an_index_the_repository_s_listing_names_the_files(hub: Hub, tmp_path: Path) -> None:
    assert start(OPEN, "brigade/unindexed", hub.endpoint, tmp_path).stdout == f"brigade/unindexed@{COMMIT}\n"
    assert hub.ranges() == [FIRST, SECOND, THIRD]
    offline = start(OPEN, "brigade/unindexed@main", hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout == f"brigade/unindexed@{COMMIT}\n"


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
    hub: Hub, tmp_path: Path, name: str, expected: str
) -> None:
    assert expected in refusal(name, hub.endpoint, tmp_path)


def test_offline_without_a_cache_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    message = refusal("brigade/tiny", hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in message
    assert "get it online once" in message
    assert hub.asked == []


def test_a_hub_that_is_down_is_refused_without_retries(tmp_path: Path) -> None:
    with serving(Hub({})) as hub:
        pass
    assert f"{hub.endpoint} does not answer" in refusal("brigade/tiny", hub.endpoint, tmp_path)


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert f"{endpoint} does not answer" in refusal("brigade/tiny", endpoint, tmp_path)


def test_a_weight_file_that_is_neither_here_nor_reachable_is_refused_with_advice(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    start(OPEN, "brigade/tiny", hub.endpoint, tmp_path)
    process = start(LOAD, "brigade/tiny", hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert process.stderr.startswith("ModelError: cannot get brigade/tiny")
    assert "HF_HUB_OFFLINE" in process.stderr
