"""Whether this machine's GPUs make the tokens of mlx-lm, and what its rounding is: `brigade verify` many times over.

python -m tools.verify_gpus --json verify_gpus.json [--quick] [--seconds 420]

Random models and the bundled one, in bfloat16 and float32, by `ar`, `ngram` and `diffusion`, in one process and on two;
where there are two GPUs, the second process has the second one. Runs seed after seed until the time is used, each run
being what `brigade verify` does, in this process so that kernels compile once. What is known so far is always on disk.
Exits with 1 if a run failed or found a difference that rounding does not explain.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
import uvloop

from coordinator.cluster.local import LocalWorker
from coordinator.cluster.options import DEFAULT_CONTEXT, ClusterOptions
from coordinator.decoding.decode_options import Decode
from coordinator.quality.report import ComparedAnswer
from coordinator.quality.verify import verify
from tools import random_model
from tools.figures import table
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import BrigadeError
from worker.node.loading import open_checkpoint
from worker.platform.machine import machine_name
from worker.platform.run import run_command

# a fixed window goes on making windows where auto, on a random model, soon makes none
_DECODES = {"ar": Decode("ar"), "ngram": Decode("ngram"), "diffusion": Decode("diffusion", 8)}
_DTYPES = {"bf16": ("bfloat16", mx.bfloat16), "fp32": ("float32", mx.float32)}
_GRACE_S = 45.0  # for the last run
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Size:
    """Of the random models and of the answers."""

    hidden: int
    layers: int
    vocab: int
    max_tokens: int


@dataclass(frozen=True)
class Run:
    """One `verify`."""

    model: str
    place: str
    decode: str
    seed: int
    took_s: float
    cases: Sequence[ComparedAnswer] = ()
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"cases": [case.as_json() for case in self.cases]}


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the figures go, anew after each run.")],
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, short answers, one seed.")] = False,
    seconds: Annotated[float, typer.Option(help="No run begins after this time; the last has 45 more.")] = 420.0,
) -> int:
    """Compare one and two processes of this machine with mlx-lm, and print a table."""
    size = Size(64, 2, 300, 4) if quick else Size(1024, 8, 32_000, 32)
    seeds = range(1) if quick else count()
    with tempfile.TemporaryDirectory() as folder:
        models = _make_models(Path(folder), size)
        runs = uvloop.run(_run_all(models, seeds, size.max_tokens, time.monotonic() + seconds, json_file))
    mx.clear_streams()
    return _print(runs)


def _make_models(folder: Path, size: Size) -> dict[str, str]:
    """Name to folder."""
    demo, models = open_checkpoint("demo").folder, {}
    for short, (name, dtype) in _DTYPES.items():
        random = folder / f"random-{short}"
        random_model.main(random, size.hidden, layers=size.layers, vocab=size.vocab, context=4096, dtype=name)
        _copy(random, random, {"mask_token_id": size.vocab - 1})
        models[f"random {short}"] = str(random)
        _copy(demo, folder / f"demo-{short}", {}, dtype)
        models[f"demo {short}"] = str(folder / f"demo-{short}")
    return models


def _copy(source: Path, target: Path, config: Mapping[str, Any], dtype: mx.Dtype | None = None) -> None:
    """A model with these keys of config.json changed, and its weights, if they are one file, in this dtype."""
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name == "config.json":
            (target / file.name).write_text(json.dumps(json.loads(file.read_text()) | config))
        elif dtype is not None and file.suffix == ".safetensors":
            weights = {name: array.astype(dtype) for name, array in mx.load(str(file)).items()}  # type: ignore[union-attr]
            mx.save_safetensors(str(target / file.name), weights, metadata={"format": "mlx"})
        elif source != target and file.is_file():
            (target / file.name).write_bytes(file.read_bytes())


async def _run_all(
    models: Mapping[str, str], seeds: Iterator[int] | range, max_tokens: int, end: float, json_file: Path
) -> list[Run]:
    runs: list[Run] = []
    alone, both = "one process", f"two processes{', two GPUs' if _second_gpu() else ''}"
    async with AsyncExitStack() as stack:
        workers = {name: await stack.enter_async_context(_second_process(models[name])) for name in models}
        cases = list(product(models, (alone, both), _DECODES))
        for seed, (model, place, decode) in ((seed, case) for seed in seeds for case in cases):
            if time.monotonic() > end:
                break
            cluster, local = (
                (ClusterConfig(), 0) if place == alone else (ClusterConfig(workers=(workers[model],)), None)
            )
            options = ClusterOptions(cluster, models[model], local, DEFAULT_CONTEXT)
            runs.append(await _run(options, model, place, decode, seed, max_tokens, end + _GRACE_S))
            _save(runs, json_file)
            mx.clear_cache()
    return runs


async def _run(
    options: ClusterOptions, model: str, place: str, decode: str, seed: int, max_tokens: int, deadline: float
) -> Run:
    begun = time.monotonic()
    cases: Sequence[ComparedAnswer] = ()
    error = ""
    try:
        async with asyncio.timeout(deadline - begun):
            report = await verify(options, _DECODES[decode], max_tokens=max_tokens, seed=seed)
        cases = report.cases
        error = f"tensors differ: {report.differing}" if report.differing else ""
    except (BrigadeError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    run = Run(model, place, decode, seed, round(time.monotonic() - begun, 1), cases, error)
    told = [error] if error else [str(case) for case in cases if case.verdict != "equal"] or ["equal"]
    print(f"{run.took_s:6.1f} s  {model}, {place}, {decode}, seed {seed}: " + "\n           ".join(told), flush=True)
    return run


@asynccontextmanager
async def _second_process(model: str) -> AsyncIterator[WorkerConfig]:
    with _visible(_second_gpu()):
        local = await LocalWorker.start("second", model)
    try:
        yield WorkerConfig(name=local.name, address=(local.address,))
    finally:
        await local.stop()


@contextmanager
def _visible(gpu: str | None) -> Iterator[None]:
    """Processes started meanwhile see this GPU alone."""
    before = os.environ.get(_VISIBLE)
    if gpu is not None:
        os.environ[_VISIBLE] = gpu
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE, None)
        if before is not None:
            os.environ[_VISIBLE] = before


def _second_gpu() -> str | None:
    """As CUDA_VISIBLE_DEVICES names it."""
    if not mx.cuda.is_available() or mx.device_count(mx.gpu) < 2:
        return None
    return os.environ.get(_VISIBLE, "0,1").split(",")[1]


def _save(runs: Sequence[Run], json_file: Path) -> None:
    figures = {
        "machine": machine_name(), "mlx": version("mlx"), "mlx_lm": version("mlx-lm"),
        "gpus": mx.device_count(mx.gpu), "runs": [run.as_json() for run in runs],
    }  # fmt: skip
    json_file.write_text(json.dumps(figures))


def summarise(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row per model, place and decoder: seeds, tokens compared, cases by verdict, failed runs, and the figures."""
    rows = []
    for key in dict.fromkeys((run.model, run.place, run.decode) for run in runs):
        own = [run for run in runs if (run.model, run.place, run.decode) == key]
        cases = [case for run in own for case in run.cases]
        verdicts = [sum(case.verdict == verdict for case in cases) for verdict in ("equal", "rounding", "DIFFERS")]
        figures = [
            f"{r.margin:.2g} <= {r.measured:.2g}" for c in cases if c.verdict == "rounding" and (r := c.rounding)
        ]
        numbers = len(own), sum(case.num_equal for case in cases), *verdicts, sum(bool(run.error) for run in own)
        rows.append((*key, *map(str, numbers), ", ".join(figures)))
    return rows


def _print(runs: Sequence[Run]) -> int:
    header = "model", "where", "decode", "seeds", "tokens", "equal", "rounding", "different", "failed"
    print(f"{machine_name()}\n")
    print(table((*header, "margin <= rounding, logits"), summarise(runs), 3), end="")
    return int(any(run.error or any(case.verdict == "DIFFERS" for case in run.cases) for run in runs))


if __name__ == "__main__":
    run_command(main)
