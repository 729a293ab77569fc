"""Tokenizers that are Python code run only where they are trusted; the model's own Python runs nowhere."""

import builtins
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from coordinator.engine.tokenizer import Tokenizer, find_tokenizer
from protos import brigade_pb2
from tests.cluster.models import make_talker
from tests.code_tokenizer import CODE, END, EOS, IMPORTED, code_kept_in, write_code_tokenizer, write_model_code
from worker.config import load_cluster
from worker.errors import ConfigError, ModelError
from worker.model.checkpoint import Checkpoint, open_folder

TEXT = "aé日😀"
OWN_CODE = {"AutoConfig": "configuration_new.NewConfig", "AutoModelForCausalLM": "modeling_new.New"}
FOREIGN_CODE = {"AutoConfig": "owner/name--configuration_new.NewConfig"}
# Values that transformers cannot take, of a type that it does not know, or knows otherwise.
UNHEARD_OF = {"rope_scaling": {"type": "yarn", "factor": 40}, "hidden_size": 64.5, "id2label": [1]}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody is asked anything: neither who sits at the terminal, nor the hub."""

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        pytest.fail(f"somebody was asked: {arguments}")

    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with code_kept_in(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("code") / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_code_tokenizer(tmp_path)


def of(folder: Path, **config: Any) -> Checkpoint:
    """The folder with this config.json, as far as tokenizers need it."""
    config = {"model_type": "kimi_k2"} | config
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(str(folder), folder, config, {})


def refusal(checkpoint: Checkpoint, *, is_trusted: bool = False) -> str:
    with pytest.raises(ModelError) as caught:
        Tokenizer(checkpoint, trust_remote_code=is_trusted)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    return message


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_code_that_is_trusted_is_the_tokenizer_and_no_code_of_its_model_runs(folder: Path, model_type: str) -> None:
    write_model_code(folder)
    tokenizer = Tokenizer(of(folder, model_type=model_type, auto_map=OWN_CODE), trust_remote_code=True)
    assert tokenizer.encode(TEXT) == bytes_of(TEXT)
    assert tokenizer.eos == {EOS}
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat == [*bytes_of("user: hi"), END, *bytes_of("assistant: ")]
    stream = tokenizer.stream(())
    assert "".join([*map(stream.push, tokenizer.encode(TEXT)), stream.finish()]) == TEXT


@pytest.mark.parametrize("model_type", ["kimi_k2", "kimi_k25", "deepseek_v3", "invented"])
def test_code_that_is_not_trusted_is_refused_by_its_file(folder: Path, talker: Path, model_type: str) -> None:
    message = refusal(of(folder, model_type=model_type))
    assert str(folder / CODE) in message and str(folder / IMPORTED) in message
    assert "Read it; then --trust-remote-code" in message
    named = "tokenization_bytes.TikTokenTokenizer"
    for auto_map in ({"AutoTokenizer": [None, named]}, {"AutoTokenizer": named}, [named, None]):
        write_code_tokenizer(folder, auto_map=auto_map)
        assert str(folder / CODE) in refusal(of(folder, model_type=model_type))
    (folder / "tokenizer.json").write_bytes((talker / "tokenizer.json").read_bytes())
    assert str(folder / CODE) in refusal(of(folder, model_type=model_type)), "by its makers' word"


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    "reference", ["owner/name--tokenization_bytes.TikTokenTokenizer", "/etc/x.Y", "../x.Y", "x.y.Z", "x"]
)
def test_code_of_other_places_is_never_run_nor_fetched(folder: Path, reference: str, is_trusted: bool) -> None:
    write_code_tokenizer(folder, auto_map={"AutoTokenizer": [reference, None]})
    message = refusal(of(folder), is_trusted=is_trusted)
    assert f"not its own: {reference}" in message and "copy the code into a folder" in message


@pytest.mark.parametrize("file", [CODE, IMPORTED])
def test_missing_code_or_packages_are_named(folder: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    text = (folder / file).read_text()
    (folder / file).write_text(f"import no_such_tiktoken\n{text}")
    message = refusal(of(folder), is_trusted=True)
    assert "imports no_such_tiktoken, not installed here" in message and "pip install no_such_tiktoken" in message
    assert capsys.readouterr() == ("", "")
    (folder / file).unlink()
    assert f"{folder} lacks {file}" in refusal(of(folder), is_trusted=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from transformers import NoSuchName", "NoSuchName"),
        ("import importlib; importlib.import_module('no_such_tiktoken')", "no_such_tiktoken"),
        ("no_such_name", "no_such_name"),
        ("def (", "invalid syntax"),
        ("assert False, 'of another time'", "of another time"),
    ],
)
def test_code_that_fails_is_a_model_error_of_one_line(folder: Path, line: str, reason: str) -> None:
    (folder / CODE).write_text(f"{line}\n{(folder / CODE).read_text()}")
    message = refusal(of(folder), is_trusted=True)
    assert f"cannot load the tokenizer of {folder}" in message and reason in message and "\n" not in message


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "kimi_k2", "auto_map": OWN_CODE},
        {"model_type": "kimi_k2", "auto_map": FOREIGN_CODE},
        {"model_type": "invented", "auto_map": OWN_CODE},
        {"model_type": "invented"},
        {"model_type": "invented", **UNHEARD_OF},
        {"model_type": "qwen3", **UNHEARD_OF},
    ],
    ids=lambda config: "-".join([config["model_type"], *list(config)[1:2]]),
)
def test_plain_tokenizers_need_no_code(tmp_path: Path, talker: Path, config: dict[str, Any], is_trusted: bool) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((talker / file).read_bytes())
    write_model_code(tmp_path)
    tokenizer = Tokenizer(of(tmp_path, **config), trust_remote_code=is_trusted)
    assert tokenizer.encode(TEXT) == Tokenizer(open_folder(talker)).encode(TEXT)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_code_that_transformers_knows_to_be_needless_is_not_run(folder: Path, talker: Path, is_trusted: bool) -> None:
    (folder / "tokenizer.json").write_bytes((talker / "tokenizer.json").read_bytes())
    (folder / CODE).write_text("raise SystemExit('run')")
    tokenizer = Tokenizer(of(folder, model_type="ernie4_5_moe"), trust_remote_code=is_trusted)
    assert tokenizer.encode(TEXT) == Tokenizer(open_folder(talker)).encode(TEXT)


@pytest.mark.parametrize("name", ["AutoTokenizer", "AutoProcessor", "AutoConfig"])
def test_a_class_that_would_ask_anew_asks_nobody(tmp_path: Path, talker: Path, name: str) -> None:
    """Of transformers' own classes some begin again, without what they were told of trust."""
    (tmp_path / "tokenizer.json").write_bytes((talker / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    own_code = OWN_CODE | {"AutoProcessor": "modeling_new.Processor"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"auto_map": own_code}))
    write_model_code(tmp_path)
    assert "cannot load the tokenizer" in refusal(of(tmp_path, auto_map=own_code))


def test_what_asks_for_no_text_goes_on_without_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_tokenizer(of(folder), trust_remote_code=False) is None
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("note: ") and str(folder / CODE) in err and "--trust-remote-code" in err
    assert find_tokenizer(of(folder), trust_remote_code=True) is not None
    assert capsys.readouterr() == ("", "")


def test_neither_a_peer_nor_a_file_can_say_that_code_is_trusted(tmp_path: Path) -> None:
    fields = [field.name for kind in brigade_pb2.DESCRIPTOR.message_types_by_name.values() for field in kind.fields]
    assert fields and not [name for name in fields if "trust" in name]
    (tmp_path / "cluster.yaml").write_text("trust_remote_code: true\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_cluster(tmp_path / "cluster.yaml")


def test_a_folder_without_its_tokenizer_is_told_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    message = refusal(of(tmp_path, model_type="qwen3"))
    assert f"{tmp_path}, which has no tokenizer.json" in message and "download the model again" in message
