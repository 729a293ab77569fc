"""What cannot be done is refused: exit code, one or two lines on standard error, nothing on standard output."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from tests.cluster.commands import run_here
from tests.cluster.models import CONTEXT, VOCAB, altered_copy, reconfigured_copy
from tests.cluster.processes import FINISH_S, Outcome, Starter, Worker, free_port, starting, write_cluster
from tests.code_tokenizer import write_code_tokenizer
from worker.node.network import PROTOCOL_VERSION
from worker.node.rpc_errors import error_of

PROMPT = "--prompt-tokens 1,2,3"
HERE = f"generate --model {{talker}} --local 0 {PROMPT}"


@dataclass(frozen=True)
class Refusal:
    """A command line, the exit code and what its message says; {words} are filled in from the fixture `places`."""

    name: str
    code: int
    command: str
    message: str  # a pattern
    stdin: str = ""
    program: str = "coordinator"
    is_process: bool = False  # of its own: its streams, its sockets or its end are the claim


def _of_model(name: str, place: str, message: str, command: str = "--local 0") -> Refusal:
    return Refusal(name, 2, f"generate --model {{{place}}} {PROMPT} {command}", message)


def _of_flag(flag: str, message: str) -> Refusal:
    return Refusal(flag[:40], 2, f"{HERE} {flag}", message)


def _of_prompt(name: str, prompt: str, message: str, stdin: str = "", *, is_process: bool = False) -> Refusal:
    command = f"generate --model {{talker}} --local 0 {prompt}"
    return Refusal(name, 2, command, message, stdin, is_process=is_process)


REFUSALS = [
    _of_model("no model folder", "nowhere", "model folder {nowhere} does not exist"),
    _of_model("no config.json", "empty", r"{empty} has no config\.json"),
    _of_model("config.json is no JSON", "no_json", r"config\.json is not valid JSON"),
    _of_model("config.json has text for a number", "no_number", r"config\.json: hidden_size: .*'many'"),
    _of_model("weights cut short", "cut_short", r"model\.safetensors: expected \d+ bytes of tensors, found \d+"),
    _of_model("weights with a corrupt header", "corrupt", "corrupt safetensors header"),
    _of_model("a tensor is missing", "no_tensor", r"lacks tensor model\.layers\.3\.self_attn\.q_proj\.weight"),
    _of_model("a tensor has another shape", "other_shape", r"\(32,\).*model\.norm\.weight"),
    _of_model("unknown model_type", "unknown", r"'mamba9' is not supported: mlx-lm [\d.]+, installed here"),
    Refusal("no tokenizer", 2, "generate --model {no_tokenizer} --local 0 --raw --prompt go", "no tokenizer"),
    Refusal("broken tokenizer", 2, "generate --model {bad_tokenizer} --local 0 --prompt go", "cannot load the token"),
    Refusal(
        "a tokenizer that is code", 2, "generate --model {code} --local 0 --prompt go",
        r"tokenizer of {code} is Python code: {code}/tokenization_bytes\.py, .*\n.*--trust-remote-code",
    ),
    Refusal(
        "code of another repository", 2, "generate --model {others_code} --local 0 --trust-remote-code --prompt go",
        r"tokenizer of {others_code} is Python code that is not its own: owner/name--tokenization_bytes\.Bytes\n",
    ),
    _of_model("layers do not add up", "talker", r"a sum of 4.*found 1,1,1 \(3\)", "--config {c} --layers 1,1,1"),
    _of_model("a zero among the layers", "talker", "at least 1 layer.*found 2,0,2", "--config {c} --layers 2,0,2"),
    _of_model("layers are no numbers", "talker", "--layers: expected whole numbers.*'two,2'", "--layers two,2"),
    _of_model("more nodes than layers", "one_layer", "found 3 nodes for 1 layers", "--config {c}"),
    Refusal("no cluster.yaml", 2, f"generate {PROMPT} --config {{nowhere}}", "{nowhere} does not exist"),
    Refusal(
        "workers that are not there", 3, "verify --model {talker} --config {absent}",
        "worker ghost: nothing answers at 127.0.0.1:.*brigade worker --config .* --name ghost\n"
        "worker shade: nothing answers at 127.0.0.1:.*brigade worker --config .* --name shade\n",
        is_process=True,
    ),
    Refusal(
        "a worker of another version", 2, f"generate --model {{talker}} --config {{stranger}} {PROMPT}",
        f"worker stranger: speaks protocol 999.*{PROTOCOL_VERSION}.*same version.*brigade launch --update",
        is_process=True,
    ),
    Refusal("port in use", 2, "--bind {mini}", "cannot listen on {mini}: in use", program="worker", is_process=True),
    Refusal("no loopback address", 2, "--bind 0.0.0.0:0", "0.0.0.0:0: .*not encrypted.*insecure", program="worker"),
    Refusal("no address", 2, "--bind elsewhere", "expected HOST:PORT.*'elsewhere'", program="worker"),
    Refusal("no name", 2, "--name my/mac --bind 127.0.0.1:0", "--name: expected letters.*'my/mac'", program="worker"),
    Refusal("no such worker", 2, "--config {c} --name maxi", "'maxi'.*mini, air", program="worker"),
    Refusal("unknown flag of a worker", 2, "--bnid 1", "No such option: --bnid", program="worker"),
    _of_prompt("empty prompt", "--prompt=", "--prompt: expected some text, found none"),
    _of_prompt("empty standard input", "--prompt -", "--prompt: expected some text, found none", stdin=""),
    _of_prompt("standard input is no text", "--prompt -", "--prompt: .* UTF-8 text", "\udcff\udcfe", is_process=True),
    _of_prompt("ids are no numbers", "--prompt-tokens 1,x", "--prompt-tokens: expected token ids.*got '1,x'"),
    _of_prompt("id outside the vocabulary", f"--prompt-tokens 1,{VOCAB}", f"--prompt-tokens: .*, found {VOCAB}"),
    _of_prompt("negative id", "--prompt-tokens=-5", f"--prompt-tokens: expected .*{VOCAB - 1}, found -5"),
    _of_prompt(
        "prompt longer than the context", "--prompt-tokens " + ",".join(["5"] * (CONTEXT + 1)),
        f"--prompt-tokens: expected less than the {CONTEXT} tokens that .*, found {CONTEXT + 1}",
    ),
    _of_prompt("prompt given twice", f"--prompt go {PROMPT}", "either --prompt TEXT .* or --prompt-tokens"),
    _of_prompt("no prompt", "", "either --prompt TEXT .* or --prompt-tokens"),
    _of_flag("--max-tokens 0", "--max-tokens: expected at least 1, got 0"),
    _of_flag("--max-tokens many", "--max-tokens"),
    _of_flag("--temp nan", "--temp: .*got nan"),
    _of_flag("--temp -1", "--temp: .*got -1"),
    _of_flag("--top-p 2", "--top-p: .*from 0 to 1, got 2"),
    _of_flag("--top-k -1", "--top-k: .*got -1"),
    _of_flag("--top-k 99999999999", "--top-k"),
    _of_flag(f"--top-k {VOCAB}", f"--top-k: .*{VOCAB}"),
    _of_flag("--logit-bias 5", "--logit-bias: expected ID:BIAS"),
    _of_flag("--logit-bias=-1:2", "--logit-bias"),
    _of_flag("--logit-bias 99999999999:2", "--logit-bias"),
    _of_flag("--logit-bias 5:nan", "--logit-bias"),
    _of_flag("--logprobs 21", "--logprobs"),
    _of_flag("--seed -1", "--seed"),
    _of_flag("--trace {nowhere}/trace.json", "--trace: .*{nowhere}/trace.json"),
    _of_flag("--local some", "--local"),
    _of_flag("--no-such-flag", "No such option: --no-such-flag"),
    _of_flag("superfluous", "superfluous"),
    Refusal("unknown command", 2, "geenrate", "No such command 'geenrate'", is_process=True),
]  # fmt: skip


class Stranger(NodeServicer):
    """A worker of a version to come."""

    def Hello(self, request: HelloRequest, context: grpc.ServicerContext) -> HelloReply:
        return HelloReply(protocol_version=999, node="stranger")


@pytest.fixture(scope="module")
def workers(module_start: Starter) -> list[Worker]:
    """Two workers that nothing is ever loaded into."""
    return [module_start.worker(name) for name in ("mini", "air")]


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_NodeServicer_to_server(Stranger(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait(5.0)


@pytest.fixture(scope="module")
def places(
    talker: Path, workers: list[Worker], stranger: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the command lines of the table speak of."""
    folder = tmp_path_factory.mktemp("refusals")
    nodes = [(worker.name, worker.address) for worker in workers]
    found: dict[str, Any] = _models(talker, folder) | {
        "talker": talker,
        "nowhere": folder / "nowhere",
        "mini": workers[0].address,
        "c": write_cluster(folder / "cluster.yaml", *nodes),
        "absent": write_cluster(
            folder / "absent.yaml", nodes[0], *((name, f"127.0.0.1:{free_port()}") for name in ("ghost", "shade"))
        ),
        "stranger": write_cluster(folder / "stranger.yaml", nodes[0], ("stranger", stranger)),
    }
    return {name: str(place) for name, place in found.items()}


def _models(talker: Path, folder: Path) -> dict[str, Path]:
    """Model folders with something wrong, by what it is."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(talker, folder / name))

    def drop_tensor(weights: dict[str, mx.array]) -> None:
        del weights["model.layers.3.self_attn.q_proj.weight"]

    def keep_one_layer(weights: dict[str, mx.array]) -> None:
        for name in [name for name in weights if re.search(r"layers\.[123]\.", name)]:
            del weights[name]

    (folder / "empty").mkdir()
    (copy("no_json") / "config.json").write_text('{"model_type": ')
    (copy("bad_tokenizer") / "tokenizer.json").write_text('{"version": ')
    for file in copy("no_tokenizer").glob("tokenizer*"):
        file.unlink()
    write_code_tokenizer(copy("code"))
    write_code_tokenizer(
        copy("others_code"), auto_map={"AutoTokenizer": ["owner/name--tokenization_bytes.Bytes", None]}
    )
    for name, damage in (
        ("cut_short", lambda data: data[:-100]),
        ("corrupt", lambda data: data[:8] + b"x" * 32 + data[40:]),
    ):
        file = copy(name) / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
    altered_copy(talker, folder / "no_tensor", drop_tensor)
    altered_copy(talker, folder / "other_shape", lambda w: w.update({"model.norm.weight": mx.ones((32,))}))
    reconfigured_copy(talker, folder / "unknown", model_type="mamba9")
    reconfigured_copy(talker, folder / "no_number", hidden_size="many")
    altered_copy(talker, folder / "one_layer_of_four", keep_one_layer)
    reconfigured_copy(folder / "one_layer_of_four", folder / "one_layer", num_hidden_layers=1)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, places: dict[str, str]) -> Iterator[dict[str, "Future[Outcome]"]]:
    """How the selected commands end that run as processes; they go on while others are refused in this one."""
    selected = [item.callspec.params.get("refusal") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        yield {r.name: pool.submit(_run, r, places) for r in selected if r in REFUSALS and r.is_process}


def _run(refusal: Refusal, places: dict[str, str]) -> Outcome:
    with starting() as start:
        return start.python("-m", refusal.program, *_arguments(refusal, places), stdin=refusal.stdin).wait()


def _arguments(refusal: Refusal, places: dict[str, str]) -> list[str]:
    return refusal.command.format_map(places).split()


def _pattern(refusal: Refusal, places: dict[str, str]) -> str:
    return refusal.message.format_map({name: re.escape(place) for name, place in places.items()})


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("refusal", [r for r in REFUSALS if not r.is_process], ids=lambda refusal: refusal.name)
def test_it_is_refused(refusal: Refusal, places: dict[str, str]) -> None:
    outcome = run_here(*_arguments(refusal, places), stdin=refusal.stdin, program=refusal.program)
    _assert_refused(outcome, refusal.code, _pattern(refusal, places))


def test_every_problem_of_a_configuration_is_reported_at_once(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "modle: demo\nlayers: [1, 0]\ncoordinator: {memory: lots}\n"
        "workers:\n  - {name: mini, address: 127.0.0.1:50071}\n  - {name: mini, address: 10.0.0.7:50071}\n"
    )
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    problems = (
        "modle",
        r"layers\[1\]",
        r"coordinator\.memory",
        r"workers\[1\]\.name",
        r"workers\[1\]\.address",
        "layers:",
    )
    _assert_refused(outcome, 2, f"{re.escape(str(config))} has {len(problems)} problem", max_lines=1 + len(problems))
    for problem in problems:
        assert re.search(rf"^ +{problem}", outcome.err, re.MULTILINE), problem


def test_a_plan_that_does_not_fit_is_refused_with_a_table_before_anything_is_loaded(
    talker: Path, workers: list[Worker], tmp_path: Path
) -> None:
    mini, air = ((worker.name, worker.address) for worker in workers)
    config = write_cluster(tmp_path / "cluster.yaml", mini, (*air, "1MiB"), model=str(talker))
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    _assert_refused(outcome, 2, r"does not fit: air lacks [\d.]+ [KM]iB\.", max_lines=6)
    rows = [line.split() for line in outcome.err.splitlines()]
    assert [row[0] for row in rows if row[0] in ("coordinator", "mini", "air")] == ["coordinator", "mini", "air"]
    assert next(row for row in rows if row[0] == "air")[-4:-2] == ["1.0", "MiB"]
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_worker_with_another_model_is_refused_with_its_name_and_both_hashes(
    start: Starter, talker: Path, tmp_path: Path, file: str
) -> None:
    other = reconfigured_copy(talker, tmp_path / "other", rms_norm_eps=1e-5 if file == "config.json" else 1e-6)
    if file == "tokenizer.json":
        (other / file).write_text((other / file).read_text() + "\n")
    config = tmp_path / "cluster.yaml"
    entry = f"{{name: mini, address: '127.0.0.1:{free_port()}', model: {other}}}"
    config.write_text(f"model: {talker}\npull: none\nworkers:\n  - {entry}\n")
    worker = start.worker("mini", "--config", config)
    assert worker.address in entry
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    _assert_refused(
        outcome, 2, rf"worker mini: .*{file.split('.')[0]}.*[0-9a-f]{{12}}.*[0-9a-f]{{12}}.*copy the same model"
    )
    hashes = re.findall(r"\b[0-9a-f]{12}\b", outcome.err)
    assert len(set(hashes)) == 2
    assert worker.status().weight_bytes == 0


def test_a_second_coordinator_is_refused_and_the_first_goes_on(start: Starter, talker: Path, tmp_path: Path) -> None:
    worker = start.worker("mini", "--model", talker)
    config = write_cluster(tmp_path / "cluster.yaml", ("mini", worker.address), model=str(talker))
    command = ("generate", "--config", config, "--prompt", "go", "--ignore-eos", "--max-tokens")
    first = start.brigade(*command, "39000")
    first.out.wait_match(".", FINISH_S)
    outcome = run_here(*command, "4")
    _assert_refused(outcome, 3, "worker mini: already serves another coordinator")
    before = len(first.out.text)
    first.out.wait_match(rf"(?s).{{{before + 200}}}", 10.0)
    assert first.is_running and worker.status().slots == 1


def test_a_worker_refuses_a_coordinator_of_another_version(workers: list[Worker]) -> None:
    with grpc.insecure_channel(workers[0].address) as channel, pytest.raises(grpc.RpcError) as caught:
        NodeStub(channel).Hello(HelloRequest(protocol_version=999), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert re.search(rf"speaks protocol {PROTOCOL_VERSION}.*999", caught.value.details())
    assert error_of(caught.value, "seen from here").node == "mini"


@pytest.mark.parametrize("refusal", [r for r in REFUSALS if r.is_process], ids=lambda refusal: refusal.name)
def test_a_process_refuses_it(
    refusal: Refusal, processes: dict[str, "Future[Outcome]"], places: dict[str, str]
) -> None:
    _assert_refused(processes[refusal.name].result(2 * FINISH_S), refusal.code, _pattern(refusal, places))


def _assert_refused(outcome: Outcome, code: int, message: str, max_lines: int = 2) -> None:
    assert outcome.err.startswith("error: "), outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err and "internal error" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) <= max_lines and max(map(len, lines)) < 400, outcome.err
