"""What cannot be done is refused: exit code, one or two lines on standard error, nothing on standard output."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import mlx.core as mx
import pytest

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from tests.cluster.commands import run_here
from tests.cluster.models import CONTEXT, VOCAB, altered_copy, make_talker, reconfigured_copy
from tests.cluster.processes import Outcome, Starter, Worker, run, write_cluster
from tests.tiny import make_model
from tools.worker_process import free_port
from worker.node.network import PROTOCOL_VERSION
from worker.node.rpc_errors import error_of

# Commands by what their message says: its field, a file or a value; the wording only where many users meet it.
OF_MODELS = {
    "--model {nowhere}": "model folder {nowhere} does not exist",
    "--model {empty}": "{empty} has no config.json",
    "--model {no_json}": "config.json",
    "--model {no_number}": "config.json: hidden_size: ",
    "--model {cut_short}": "model.safetensors: ",
    "--model {no_tensor}": "model.layers.3.self_attn.q_proj.weight",
    "--model {other_shape}": "model.norm.weight",
    "--model {unknown}": "'mamba9'",
    "--model {outside}": "config.json: mask_token_id: ",
    "--model {talker} --config {c} --layers 1,1,1": "(3)",
    "--model {talker} --config {c} --layers 2,0,2": "2,0,2",
    "--model {talker} --layers two,2": "--layers: ",
    "--config {nowhere}": "{nowhere} does not exist",
    f"--prompt-tokens 1,{VOCAB}": "--prompt-tokens: ",
    "--prompt-tokens " + ",".join(["5"] * (CONTEXT + 1)): f"--prompt-tokens: expected less than the {CONTEXT} tokens",
    "--prompt go": "--prompt TEXT",
    "--max-tokens 0": "--max-tokens: ",
    "--temp nan": "--temp: ",
    f"--top-k {VOCAB}": "--top-k: ",
    "--logit-bias 5": "--logit-bias: ",
    "--logit-bias 5:nan": "--logit-bias: ",
    "--logprobs 21": "--logprobs",
    "--trace {nowhere}/trace.json": "--trace: ",
    "--no-such-flag": "No such option: --no-such-flag",
    "superfluous": "superfluous",
    "--decode diffusion": "mask_token_id",
    "--decode diffusion-fast": "mask",
    "--decode magic": "--decode: ",
    "--model {hybrid} --decode diffusion": "recurrent layers",
    "--model {masked} --window 0": "--window: ",
    "--model {masked} --window x": "--window: ",
    "--model {masked} --kv rotating --max-kv-size 32 --window 32": "--window: ",
    "--model {masked} --entropy-threshold -1": "--entropy-threshold: ",
    "--model {masked} --position-penalty inf": "--position-penalty: ",
    "--kv int8": "--kv: ",
    "--kv rotating": "--max-kv-size: ",
    "--max-kv-size 64": "--max-kv-size: ",
    "--repeat-guard -1": "--repeat-guard",
}
OTHERS = {
    "generate --model {no_tokenizer} --local 0 --raw --prompt go": "tokenizer",
    "generate --model {bad_tokenizer} --local 0 --prompt go": "tokenizer",
    "generate --model {talker} --local 0 --prompt=": "--prompt: ",
    "generate --model {talker} --local 0 --prompt -": "--prompt: ",
    "generate --model {talker} --local 0": "--prompt-tokens",
    "generate --model {one_layer} --config {c} --prompt-tokens 1": "found 3 nodes for 1 layers",
    "verify --model {talker} --config {absent} --decode diffusion": "mask_token_id",
    "worker --bind {mini}": "cannot listen on {mini}: in use",
    "worker --bind 0.0.0.0:0": "insecure",
    "worker --bind elsewhere": "'elsewhere'",
    "worker --name my/mac --bind 127.0.0.1:0": "--name: ",
    "worker --config {c} --name maxi": "'maxi'",
    "worker --bnid 1": "No such option: --bnid",
}


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
def places(talker: Path, workers: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files and addresses of the tables, by name; nothing answers at the workers of `absent`."""
    folder = tmp_path_factory.mktemp("refusals")
    ghosts = [(name, f"127.0.0.1:{free_port()}") for name in ("ghost", "shade")]
    write_models(talker, folder)
    found = {path.name: path for path in folder.iterdir()} | {
        "talker": talker,
        "nowhere": folder / "nowhere",
        "c": write_cluster(folder / "cluster.yaml", *((worker.name, worker.address) for worker in workers)),
        "absent": write_cluster(folder / "absent.yaml", *ghosts),
    }
    return {name: str(place) for name, place in found.items()} | {"mini": workers[0].address}


def write_models(talker: Path, folder: Path) -> None:
    """Model folders, most of them with something wrong, named by what it is."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(talker, folder / name))

    def drop_tensor(weights: dict[str, mx.array]) -> None:
        del weights["model.layers.3.self_attn.q_proj.weight"]

    def keep_one_layer(weights: dict[str, mx.array]) -> None:
        for name in [name for name in weights if re.search(r"layers\.[123]\.", name)]:
            del weights[name]

    make_talker(folder / "masked", mask_token_id=0)
    make_model(folder / "hybrid", "qwen3_5", config={"mask_token_id": 0})
    (folder / "empty").mkdir()
    (copy("no_json") / "config.json").write_text('{"model_type": ')
    (copy("bad_tokenizer") / "tokenizer.json").write_text('{"version": ')
    for file in copy("no_tokenizer").glob("tokenizer*"):
        file.unlink()
    weights = copy("cut_short") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    altered_copy(talker, folder / "no_tensor", drop_tensor)
    altered_copy(talker, folder / "other_shape", lambda w: w.update({"model.norm.weight": mx.ones((32,))}))
    reconfigured_copy(talker, folder / "unknown", model_type="mamba9")
    reconfigured_copy(talker, folder / "no_number", hidden_size="many")
    reconfigured_copy(talker, folder / "outside", mask_token_id=VOCAB)
    altered_copy(talker, folder / "one_of_four", keep_one_layer)
    reconfigured_copy(folder / "one_of_four", folder / "one_layer", num_hidden_layers=1)


def assert_refused(outcome: Outcome, code: int, said: str, max_lines: int = 2) -> None:
    assert outcome.err.startswith("error: ") and said in outcome.err, outcome.err
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert "Traceback" not in outcome.err and "internal error" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(lines) <= max_lines and max(map(len, lines)) < 400, outcome.err


@pytest.mark.parametrize("flags", OF_MODELS, ids=lambda flags: flags[:40])
def test_generate_refuses_it_before_any_worker_is_asked(places: dict[str, str], flags: str) -> None:
    """A worker that was asked would be missing: exit code 3."""
    usual = {"--model": "{talker}", "--config": "{absent}", "--prompt-tokens": "1,2,3"}
    given = flags.split()
    more = [word for flag in usual.items() if flag[0] not in given for word in flag]
    arguments = [word.format_map(places) for word in (*given, *more)]
    assert_refused(run_here("generate", *arguments), 2, OF_MODELS[flags].format_map(places))


@pytest.mark.parametrize("command", OTHERS)
def test_it_is_refused(places: dict[str, str], command: str) -> None:
    program, *arguments = command.format_map(places).split()
    outcome = run_here(*arguments, program="worker") if program == "worker" else run_here(program, *arguments, stdin="")
    assert_refused(outcome, 2, OTHERS[command].format_map(places))


def test_a_process_refuses_an_unknown_command() -> None:
    assert_refused(run("geenrate"), 2, "No such command 'geenrate'")


def test_standard_input_that_is_no_text_is_refused(places: dict[str, str]) -> None:
    outcome = run_here("generate", "--model", places["talker"], "--local", "0", "--prompt", "-", stdin="\udcff\udcfe")
    assert_refused(outcome, 2, "--prompt: ")


def test_workers_that_are_not_there_are_all_named_with_the_command_that_starts_them(places: dict[str, str]) -> None:
    outcome = run_here("verify", "--model", places["talker"], "--config", places["absent"])
    assert outcome.code == 3 and outcome.out == ""
    for name in ("ghost", "shade"):
        assert re.search(
            rf"worker {name}: nothing answers at 127.0.0.1:.*brigade worker --config .* --name {name}\n", outcome.err
        )


def test_versions_that_differ_are_refused_on_both_sides(workers: list[Worker], stranger: str, tmp_path: Path) -> None:
    nodes = (workers[0].name, workers[0].address), ("stranger", stranger)
    outcome = run_here("generate", "--config", write_cluster(tmp_path / "cluster.yaml", *nodes), "--prompt", "go")
    assert_refused(outcome, 2, "worker stranger: speaks protocol 999")
    assert re.search(rf"{PROTOCOL_VERSION}.*same version.*brigade launch --update", outcome.err)
    with grpc.insecure_channel(workers[0].address) as channel, pytest.raises(grpc.RpcError) as caught:
        NodeStub(channel).Hello(HelloRequest(protocol_version=999), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert re.search(rf"speaks protocol {PROTOCOL_VERSION}.*999", caught.value.details())
    assert error_of(caught.value, "seen from here").node == "mini"


def test_a_worker_with_another_tokenizer_is_refused_with_its_name_and_both_hashes(
    start: Starter, talker: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(talker, tmp_path / "other"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    config = tmp_path / "cluster.yaml"
    entry = f"{{name: mini, address: '127.0.0.1:{free_port()}', model: {other}}}"
    config.write_text(f"model: {talker}\npull: none\nworkers: [{entry}]\n")
    worker = start.worker("mini", "--config", config)
    assert worker.address in entry
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    assert_refused(outcome, 2, "worker mini: ")
    assert "tokenizer" in outcome.err and len(set(re.findall(r"\b[0-9a-f]{12}\b", outcome.err))) == 2
    assert worker.status().weight_bytes == 0


def test_a_configuration_is_refused_with_its_file_and_each_problem_on_a_line(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("modle: demo\ncoordinator: {memory: lots}\n")
    outcome = run_here("generate", "--config", config, "--prompt", "go")
    assert_refused(outcome, 2, f"{config} has 2 problem", max_lines=3)
    assert all(f"\n  {key}: " in outcome.err for key in ("modle", "coordinator.memory"))
