"""Rig: worker processes kept from case to case, and clusters over them whose coordinator is in this process."""

import contextlib
import io
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from coordinator.cluster.open import open_cluster, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.engine.engine import Engine, generate_once
from coordinator.engine.tokenizer import Tokenizer
from coordinator.planning.recovery import Limits
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request, eos_ids
from tools.faults.trial import Trial
from tools.worker_process import WorkerProcess
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.model.checkpoint import Checkpoint

NAMES = ("first", "last")  # stages 1 and 2
CONTEXT = 1024  # tokens


class Rig:
    """Two workers and a model. Use as an async context manager; it ends whatever it has started."""

    def __init__(self, folder: Path, model: str = "demo") -> None:
        self.folder = folder
        self.model = model
        self.nodes = {name: WorkerProcess(name, (), folder / f"{name}.log", {"HF_HUB_OFFLINE": "1"}) for name in NAMES}
        self.checkpoint: Checkpoint
        self.tokenizer: Tokenizer
        self.eos: frozenset[int]
        self._expected: dict[str, Answer] = {}

    async def __aenter__(self) -> "Rig":
        self.checkpoint, _ = await read_model(self.model)
        self.tokenizer = Tokenizer(self.checkpoint)
        self.eos = eos_ids(self.checkpoint.config, self.checkpoint.generation_config) | self.tokenizer.eos
        return self

    async def __aexit__(self, *exc: object) -> None:
        for node in self.nodes.values():
            if node.is_running:
                node.kill()
                node.signal(signal.SIGCONT)
                await node.wait_ended(5.0)

    @property
    def first(self) -> WorkerProcess:
        return self.nodes["first"]

    @property
    def last(self) -> WorkerProcess:
        return self.nodes["last"]

    async def make_whole(self, **failpoints: str) -> None:
        """Every worker runs and holds no session; these with these failpoints, the others as they are installed."""
        for node in self.nodes.values():
            failpoint = failpoints.get(node.name, "")
            if node.is_running and (failpoint or node.is_spoiled):
                node.kill()
                await node.wait_ended(5.0)
            if not node.is_running:
                node.start(failpoint)
        for node in self.nodes.values():
            await node.wait_listening()
            await node.wait_free()

    async def end(self) -> list[int]:
        """Tell every worker to end; their exit codes."""
        for node in self.nodes.values():
            node.signal(signal.SIGTERM)
        return [await node.wait_ended(15.0) for node in self.nodes.values()]

    def prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_chat([{"role": "user", "content": text}]))

    def options(
        self,
        limits: Limits,
        *,
        nodes: Sequence[str] = NAMES,
        via: dict[str, str] | None = None,
        memory: int | None = None,
        check_finite: bool = False,
    ) -> ClusterOptions:
        """A configuration over these nodes, some of them at another address (`via`), each with so much memory."""
        addresses = {name: self.nodes[name].address for name in nodes} | (via or {})
        workers = tuple(WorkerConfig(name=name, address=(addresses[name],), memory=memory) for name in nodes)
        cluster = ClusterConfig(coordinator=CoordinatorConfig(memory=memory), workers=workers)
        return ClusterOptions(cluster, self.model, None, CONTEXT, check_finite=check_finite, limits=limits)

    @contextlib.asynccontextmanager
    async def opened(self, options: ClusterOptions) -> AsyncIterator[Trial]:
        """A cluster that requests can be tried on. What it says on standard error is kept."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            async with open_cluster(options, self.checkpoint) as cluster:
                trial = Trial(cluster, self.tokenizer, said)
                async with Engine(cluster.chain, when_lost=trial.reopen) as trial.engine:
                    yield trial

    async def expected(self, requests: Sequence[Request]) -> list[Answer]:
        """What one process answers to each alone; computed once."""
        if missing := [each for each in requests if _key(each) not in self._expected]:
            options = ClusterOptions(ClusterConfig(), self.model, 0, CONTEXT)
            with contextlib.redirect_stderr(io.StringIO()):
                async with open_cluster(options, self.checkpoint) as one:
                    for each in missing:
                        text = self.tokenizer.stream(each.stops)
                        self._expected[_key(each)] = await generate_once(one.chain, each, parser=text)
        return [self._expected[_key(each)] for each in requests]


def _key(request: Request) -> str:
    return repr(request)
