"""The hub, served by a real HTTP server on this machine and asked by huggingface_hub."""

import asyncio
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from coordinator.engine.tokenizer import Tokenizer
from tests.code_tokenizer import CODE, IMPORTED, code_kept_in, write_code_tokenizer, write_model_code
from tests.tiny import make_model
from worker.errors import ModelError
from worker.model import hub as hub_module
from worker.model.contents import contents_of
from worker.model.repository import is_repository
from worker.node.loading import load_shard, open_checkpoint
from worker.platform.threads import MlxThread

FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))  # SECOND ends in layer 2 of 4
COMMIT = "c0ffee" + 34 * "0"


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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "model", num_files=3)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "README.md").write_text("not needed to run the model")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    files = files_of(folder)
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


def report(model: str) -> dict[str, Any]:
    """What loading layers [0, 2) of it brings, from first to last."""
    checkpoint = open_checkpoint(model)
    before = {path.name for path in checkpoint.folder.iterdir()}
    progress: list[tuple[str, int, int]] = []

    async def load() -> dict[str, str]:
        thread = MlxThread()
        try:
            shard = await load_shard(checkpoint, 0, 2, thread, lambda p: progress.append((p.phase, p.done, p.total)))
            return await thread.run(shard.digests)
        finally:
            thread.close()

    digests = asyncio.run(load())
    after = {path.name for path in checkpoint.folder.iterdir()}
    return {
        "name": checkpoint.name, "before": before, "after": after, "progress": progress,
        "digests": digests, "fingerprint": checkpoint.fingerprint,
    }  # fmt: skip


def refusal(model: str) -> str:
    """The message of the ModelError with which opening the model ends."""
    with pytest.raises(ModelError) as caught:
        hub_module.open_repository(model)
    assert len(str(caught.value).strip().splitlines()) <= 2
    return str(caught.value)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def test_a_repository_is_told_by_its_name() -> None:
    names = ["owner/name", "owner/name-4bit@v1.0", "demo", "/tmp/model", "a/b/c", "../x", "./x", "owner/.."]
    names += ["owner/name@..", "owner/name@a/b"]
    assert [name for name in names if is_repository(name)] == names[:2]


def test_a_shard_downloads_only_its_files_and_loads_again_offline(folder: Path, asking: Ask, tmp_path: Path) -> None:
    with serving(Hub({"brigade/tiny": files_of(folder)})) as hub, asking(hub.endpoint, tmp_path):
        first = report("brigade/tiny")
    local = report(str(folder))
    assert (first["digests"], first["fingerprint"]) == (local["digests"], local["fingerprint"])
    assert first["name"] == f"brigade/tiny@{COMMIT}"
    assert hub.ranges() == [FIRST, SECOND, THIRD], "each header is asked for once"
    assert hub.downloads() & {FIRST, SECOND, THIRD} == {FIRST, SECOND}
    assert not {FIRST, SECOND, THIRD} & first["before"], "opening must not download weight files"
    assert first["after"] == {path.name for path in folder.iterdir()} - {THIRD, "README.md"}
    for phase in ("download", "load"):  # a bar moves and ends at its total
        steps = [(done, total) for name, done, total in first["progress"] if name == phase]
        assert len(steps) > 1 and steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    for offline in (True, False):
        with asking(hub.endpoint, tmp_path, offline=offline):
            second = report("brigade/tiny")
        assert [second[same] == first[same] for same in ("name", "digests", "fingerprint")] == [True] * 3


def test_a_second_start_asks_for_no_file_and_for_nothing_of_a_commit(hub: Hub, asking: Ask, tmp_path: Path) -> None:
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
        found = hub_module.open_repository("brigade/tiny")
    assert hub.ranges() == [THIRD], "headers of files that are here are not fetched"
    assert len(found.opened) == 2, "the files that are here, to be compared before each load"
    hashes = {file: _etag(hub.repositories["brigade/tiny"][file]) for file in (FIRST, SECOND, THIRD)}
    assert contents_of(found).hub_hashes == hashes, "which tell it from another copy: tests/unit/model/test_contents.py"


def test_without_an_index_the_repository_s_listing_names_the_files(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    for offline, name in ((False, "brigade/unindexed"), (True, "brigade/unindexed@main")):
        with asking(hub.endpoint, tmp_path, offline=offline):
            assert hub_module.open_repository(name).name == f"brigade/unindexed@{COMMIT}"
    assert hub.ranges() == [FIRST, SECOND, THIRD]


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


def test_offline_what_is_not_in_the_cache_is_refused_at_once(hub: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(hub.endpoint, tmp_path, offline=True):
        assert re.search("HF_HUB_OFFLINE is set.*get it online once", refusal("brigade/tiny"))
    assert hub.asked == []
    with asking(hub.endpoint, tmp_path):
        hub_module.open_repository("brigade/tiny")
    with asking(hub.endpoint, tmp_path, offline=True), pytest.raises(ModelError, match=r"^cannot get .*HF_HUB_OFFLINE"):
        report("brigade/tiny")


@pytest.mark.timeout(10)  # huggingface_hub's retries would take 23 s
@pytest.mark.parametrize("is_silent", [False, True], ids=["down", "silent"])
def test_a_hub_that_does_not_answer_is_given_up_without_retries(
    asking: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_silent: bool
) -> None:
    monkeypatch.setattr(hub_module, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not is_silent:
            silent.close()
        with asking(endpoint, tmp_path):
            assert f"{endpoint} does not answer" in refusal("brigade/tiny")


# --- code of a tokenizer --------------------------------------------------------------------------------------------


@pytest.fixture
def kimi(tmp_path: Path) -> Iterator[Hub]:
    folder = make_model(tmp_path / "kimi")
    write_model_code(folder)
    with serving(Hub({"brigade/kimi": files_of(write_code_tokenizer(folder))})) as hub:
        yield hub


def test_code_is_not_even_fetched_before_it_is_trusted(kimi: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(kimi.endpoint, tmp_path):
        checkpoint = hub_module.open_repository("brigade/kimi")
        with pytest.raises(
            ModelError, match=f"{kimi.endpoint}/brigade/kimi/blob/{COMMIT}/{CODE}\n.*--trust-remote-code"
        ):
            Tokenizer(checkpoint)
    assert "tiktoken.model" in kimi.downloads()
    assert not [file for file in kimi.downloads() if file.endswith(".py")]


def test_of_trusted_code_only_what_the_tokenizer_needs_is_fetched(kimi: Hub, asking: Ask, tmp_path: Path) -> None:
    with asking(kimi.endpoint, tmp_path), code_kept_in(tmp_path / "modules"):
        tokenizer = Tokenizer(hub_module.open_repository("brigade/kimi"), trust_remote_code=True)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert {file for file in kimi.downloads() if file.endswith(".py")} == {CODE, IMPORTED}
    asked = [path for _, path, _ in kimi.asked if path.endswith(CODE)]
    assert asked and all(f"/{COMMIT}/" in path for path in asked), "in the state that was read, whatever is there now"
