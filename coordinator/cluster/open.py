"""From a configuration to a running chain: who takes part, what each holds, all opened and closed in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import COORDINATOR_ID, Peer, differences, greet, peers_of, raise_worst
from coordinator.cluster.progress import ASKING, STARTING, say, show_progress
from coordinator.cluster.survey import known_speeds
from coordinator.planning import planner
from coordinator.planning.plan import Contexts, MemoryOffer, Node, Objective, Plan, budgets, check_split, require_fit
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NOTHING_KNOWN, Survey
from protos.brigade_pb2 import (
    Coordinator,
)
from worker.config import ClusterConfig, CoordinatorConfig, is_loopback, split_address
from worker.errors import BrigadeError, ConfigError, StageLost
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.families import is_tested
from worker.model.modelspec import ModelSpec
from worker.node.identity import Role
from worker.node.loading import open_checkpoint
from worker.node.network import Network
from worker.platform.machine import kept_awake, memory_budget
from worker.platform.threads import MlxThread, run_in_thread

_PAUSE_S = 0.5  # between two rounds of asking
NO_RECOVERY = Limits(rejoin_s=0.0, recovery_s=0.0)  # the first error is final


@asynccontextmanager
async def open_nodes(options: ClusterOptions, spec: ModelSpec, *, keep: bool = True) -> AsyncIterator[Nodes]:
    """The workers: `local` processes of our own, started again when they end (`keep`), or those of the configuration.

    Raises:
        ConfigError: the model cannot be split over so many nodes; none is started then.
    """
    check_split(spec, 1 + options.num_workers, options.cluster.layers)
    async with AsyncExitStack() as stack:
        network, local = Network(), []  # local ones listen on loopback
        if options.local is None:
            name, warn = options.cluster.coordinator.name, lambda line: say(f"warning: {line}")
            network = Network.of(options.cluster, name, Role.COORDINATOR, warn)
            peers = [Peer(each.name, each.addresses, network, say) for each in options.cluster.workers]
        else:
            local = await start_local(options.local, options.model, stack)
            peers = [Peer(worker.name, [worker.address], network) for worker in local]
        async with Nodes(peers, options.cluster) as nodes:
            if keep:
                nodes.keep(local, network, say)
            yield nodes


@asynccontextmanager
async def open_peers(options: ClusterOptions, spec: ModelSpec) -> AsyncIterator[list[Peer]]:
    """The workers, left alone when they end. Raises ConfigError likewise."""
    async with open_nodes(options, spec, keep=False) as nodes:
        yield nodes.peers(nodes.workers)


async def read_model(model: str) -> tuple[Checkpoint, ModelSpec]:
    """Configuration and headers only; says so if the type is a new one.

    Raises:
        ModelError: it is not there, damaged, or not supported.
    """
    checkpoint = await run_in_thread(lambda: open_checkpoint(model))
    spec = await run_in_thread(lambda: describe(checkpoint))
    if not is_tested(checkpoint.config):
        say(f"note: no test has seen a {spec.family} model yet; compare with `brigade verify` before you rely on it")
    return checkpoint, spec


async def ask_nodes(cluster: ClusterConfig, peers: Sequence[Peer]) -> list[Node]:
    """Each node's memory budget: what the configuration says, else what it offers itself."""
    greetings = await greet(peers)
    configured = {address: worker.memory for worker in cluster.workers for address in worker.addresses}
    theirs = []
    for peer, greeting in zip(peers, greetings, strict=True):
        for difference in differences(peer.name, cluster, greeting):
            say(f"warning: {difference}")
        theirs.append(MemoryOffer(greeting.memory_bytes, configured.get(peer.address), _is_here(peer)))
    names = [cluster.coordinator.name, *(peer.name for peer in peers)]
    return list(map(Node, names, budgets(MemoryOffer(memory_budget(), cluster.coordinator.memory), theirs)))


async def choose_plan(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    peers: Sequence[Peer],
    context: int | Contexts,
    *,
    by_speed: bool = True,
    may_be_alone: bool = True,
) -> tuple[Plan, Survey, Objective]:
    """Ask every node what it offers and plan, `by_speed` where the nodes are different machines.

    Workers that make nothing faster are left out then, all of them if the coordinator `may_be_alone`.

    Returns:
        The plan, and the speeds and the objective for planning again after a loss. Given layers are those of the
        first chain.
    Raises:
        ConfigError: `layers` does not suit the model and the nodes. StageLost: a node is missing.
    """
    contexts = context if isinstance(context, Contexts) else Contexts.exactly(min(context, spec.context))
    nodes = await ask_nodes(options.cluster, peers)
    speeds = await known_speeds(options, checkpoint, peers) if by_speed else NOTHING_KNOWN
    objective = Objective(
        contexts.least,
        contexts.most,
        goal=options.objective,
        num_requests=options.num_requests,
        layers=options.cluster.layers,
        is_order_fixed=options.cluster.order == "fixed",
        may_be_alone=may_be_alone,
    )
    plan = planner.plan(spec, nodes, speeds, objective)
    if left_out := [node.name for node in nodes if node.name not in plan.names]:
        say(f"without {' and '.join(left_out)}, which would not make it faster: `brigade plan` has the figures")
    return plan, speeds, objective


def members_of(plan: Plan, peers: Sequence[Peer]) -> list[Peer]:
    """The workers of a plan, in its order."""
    by_name = {peer.name: peer for peer in peers}
    return [by_name[assignment.name] for assignment in plan.assignments[1:]]


@asynccontextmanager
async def open_chain(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    context: int,
    thread: MlxThread | None = None,
    *,
    every_node: bool = False,
) -> AsyncIterator[Chain]:
    """Open one chain over all workers; at least one takes part, or `every_node`, even where this node is faster alone.

    A chain that is lost stays lost: what is measured on it must not go on on another one. Whoever has several chains
    open at once gives all of them this process's MLX thread.

    Raises:
        BrigadeError: what the first node that cannot take part says.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            nodes = await stack.enter_async_context(open_nodes(options, spec, keep=False))
            progress("", ASKING)
            peers = nodes.peers(nodes.workers)
            plan, _, _ = await choose_plan(
                *(options, checkpoint, spec, peers, context),
                by_speed=not every_node and options.cluster.layers is None,
                may_be_alone=False,
            )
            require_fit(plan, spec)
            deployment = _deployment(options, checkpoint, spec, plan, peers)
            own = await stack.enter_async_context(OwnNode(thread))
            cluster = await stack.enter_async_context(Cluster(own, nodes, deployment, NO_RECOVERY, say=say))
            chain = await cluster.open(progress)
        yield chain


@asynccontextmanager
async def open_cluster(
    options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, context: int | Contexts
) -> AsyncIterator[Cluster]:
    """Open a cluster for requests, which outlive chains: a lost chain is opened again, over whichever nodes there are.

    Workers that do not answer for a while are gone without, if the model fits on the others, and taken in later.

    Raises:
        BrigadeError: what the first node that cannot take part says.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            nodes = await stack.enter_async_context(open_nodes(options, spec))
            progress("", ASKING)
            if options.local and options.limits.recovery_s:
                await nodes.wait_all(options.limits.recovery_s)
            elif options.limits.recovery_s:
                await _wait_for_workers(nodes, options.limits.arrival_s)
            missing = [each.name for each in nodes.workers.values() if options.limits.recovery_s and not each.answers]
            peers = nodes.peers(name for name in nodes.workers if name not in missing)
            opening = cluster_over(nodes, peers, options, checkpoint, spec, context, progress, missing=missing)
            cluster = await stack.enter_async_context(opening)
        yield cluster


async def _wait_for_workers(nodes: Nodes, arrival_s: float) -> None:
    """Return once all workers answer, or none has begun to for so long.

    Raises:
        BrigadeError: of a worker that answers and cannot take part.
    """
    missing = list(nodes.workers)
    arrived_at = time.monotonic()
    while missing and (left_s := arrived_at + arrival_s - time.monotonic()) > 0:
        await nodes.ask(missing, left_s)
        raise_worst(
            [
                each.trouble
                for each in nodes.workers.values()
                if each.trouble and not isinstance(each.trouble, StageLost)
            ]
        )
        still = [name for name in missing if not nodes.workers[name].answers]
        if len(still) < len(missing):
            arrived_at = time.monotonic()
        missing = still
        if missing:
            await nodes.pause(min(_PAUSE_S, arrival_s))


@asynccontextmanager
async def cluster_over(
    nodes: Nodes,
    peers: Sequence[Peer],
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    context: int | Contexts,
    progress: Progress = lambda node, report: None,
    *,
    missing: Sequence[str] = (),
    say: Callable[[str], None] = say,
    thread: MlxThread | None = None,
) -> AsyncIterator[Cluster]:
    """Open the first chain over these peers; other workers are spare, but for those that are `missing` by now.

    Whoever opens several clusters gives all of them this process's MLX thread.
    """
    layers = options.cluster.layers
    given = options.with_layers(None) if missing else options
    try:
        plan, speeds, objective = await choose_plan(given, checkpoint, spec, peers, context)
        require_fit(plan, spec)
    except ConfigError:
        raise_worst([nodes.workers[name].trouble for name in missing])
        raise
    if missing:
        troubles = "; ".join(str(nodes.workers[name].trouble or f"worker {name}: does not answer") for name in missing)
        say(f"going on without {' and '.join(missing)}, since the model fits on the others: {troubles}")
    deployment = _deployment(options, checkpoint, spec, plan, peers)
    async with (
        OwnNode(thread, keeps_to_plan=thread is None) as own,
        Cluster(
            *(own, nodes, deployment, options.limits),
            say=say,
            speeds=speeds,
            objective=objective,
            layers=layers,
            missing=missing,
        ) as cluster,
    ):
        await cluster.open(progress)
        yield cluster


@asynccontextmanager
async def joined(
    deployment: Deployment,
    progress: Progress = lambda node, report: None,
    *,
    say: Callable[[str], None] = lambda line: None,
    thread: MlxThread | None = None,
) -> AsyncIterator[Chain]:
    """Open one chain by a plan that is made already."""
    coordinator = CoordinatorConfig(name=deployment.plan.assignments[0].name)
    nodes = Nodes(deployment.peers, ClusterConfig(coordinator=coordinator))
    async with OwnNode(thread) as own, nodes, Cluster(own, nodes, deployment, NO_RECOVERY, say=say) as cluster:
        yield await cluster.open(progress)


async def start_local(count: int, model: str, stack: AsyncExitStack) -> list[LocalWorker]:
    """So many workers of our own for this model, worker-1 and so on; the stack's end ends them."""
    starts = [asyncio.create_task(LocalWorker.start(f"worker-{i + 1}", model)) for i in range(count)]

    async def stop_all() -> None:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in outcomes if isinstance(worker, LocalWorker)))

    stack.push_async_callback(stop_all)
    return list(await asyncio.gather(*starts))


def _deployment(
    options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, plan: Plan, peers: Sequence[Peer]
) -> Deployment:
    return Deployment(checkpoint, spec, plan, members_of(plan, peers), options.check_finite, options.feeds)


def _is_here(peer: Peer) -> bool:
    return is_loopback(split_address(peer.address)[0])


async def unload_workers(options: ClusterOptions) -> None:
    """Ask all of them; one that does not is told of. Workers of our own have ended, and hold nothing."""
    if options.local is not None:
        return
    own = options.cluster.coordinator.name
    network = Network.of(options.cluster, own, Role.COORDINATOR)
    async with peers_of(options.cluster, network) as peers:
        await asyncio.gather(*(_unload(peer, Coordinator(id=COORDINATOR_ID, name=own)) for peer in peers))


async def _unload(peer: Peer, coordinator: Coordinator) -> None:
    try:
        await peer.hello()  # at whichever of its addresses it is
        await peer.unload(coordinator)
    except BrigadeError as error:
        say(f"{error}; what it holds stays there")
