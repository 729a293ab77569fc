"""From a configuration to a running chain: who takes part, what each holds, all opened and closed in order."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.greetings import differences, greet
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import ASKING, STARTING, say, show_progress
from coordinator.cluster.roster import Roster
from coordinator.cluster.supervisor import Supervisor
from coordinator.cluster.survey import known_speeds
from coordinator.planning.budgets import Offer, budgets
from coordinator.planning.contexts import Contexts, plan_largest
from coordinator.planning.plan import Node, Plan, check_split, require_fit
from coordinator.planning.replan import Replan
from worker.config import Cluster, is_loopback, split_address
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.families import is_tested
from worker.model.modelspec import ModelSpec
from worker.node.identity import Role
from worker.node.loading import open_checkpoint
from worker.node.network import Network
from worker.process.call_thread import run_aside
from worker.process.machine import kept_awake, memory_budget
from worker.process.mlx_thread import MlxThread


@asynccontextmanager
async def open_roster(options: ClusterOptions, spec: ModelSpec, *, keep: bool = True) -> AsyncIterator[Roster]:
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
        async with Roster(peers, options.cluster) as roster:
            if keep:
                roster.keep(local, network, say)
            yield roster


@asynccontextmanager
async def open_peers(options: ClusterOptions, spec: ModelSpec) -> AsyncIterator[list[Peer]]:
    """The workers, left alone when they end. Raises ConfigError likewise."""
    async with open_roster(options, spec, keep=False) as roster:
        yield roster.peers(roster.members)


async def read_model(model: str) -> tuple[Checkpoint, ModelSpec]:
    """Configuration and headers only; says so if the type is a new one.

    Raises:
        ModelError: it is not there, damaged, or not supported.
    """
    checkpoint = await run_aside(lambda: open_checkpoint(model))
    spec = await run_aside(lambda: describe(checkpoint))
    if not is_tested(checkpoint.config):
        say(f"note: no test has seen a {spec.family} model yet; compare with `brigade verify` before you rely on it")
    return checkpoint, spec


async def ask_nodes(cluster: Cluster, peers: Sequence[Peer]) -> list[Node]:
    """Each node's memory budget: what the configuration says, else what it offers itself."""
    greetings = await greet(peers)
    configured = {address: worker.memory for worker in cluster.workers for address in worker.addresses}
    theirs = []
    for peer, greeting in zip(peers, greetings, strict=True):
        for difference in differences(peer.name, cluster, greeting):
            say(f"warning: {difference}")
        theirs.append(Offer(greeting.memory_bytes, configured.get(peer.address), _is_here(peer)))
    names = [cluster.coordinator.name, *(peer.name for peer in peers)]
    return list(map(Node, names, budgets(Offer(memory_budget(), cluster.coordinator.memory), theirs)))


async def make_plan(cluster: Cluster, spec: ModelSpec, peers: Sequence[Peer], context: int | Contexts) -> Plan:
    """Ask every node what it offers and split the model.

    Raises:
        ConfigError: `layers` does not suit the model and the nodes. StageLost: a node is missing.
    """
    contexts = context if isinstance(context, Contexts) else Contexts.exactly(min(context, spec.context))
    return plan_largest(spec, await ask_nodes(cluster, peers), contexts, cluster.layers)


async def choose_plan(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    peers: Sequence[Peer],
    context: int | Contexts,
    *,
    may_be_alone: bool = True,
) -> tuple[Plan, Replan]:
    """The same, by speed where the nodes are different machines and nobody says `layers`; and how to do so again.

    Workers that make nothing faster are left out then, all of them if that `may_be_alone`. Given `layers` are those of
    the first chain: what a loss leaves is planned by speed, too.
    """
    cluster = options.cluster
    contexts = context if isinstance(context, Contexts) else Contexts.exactly(min(context, spec.context))
    nodes = await ask_nodes(cluster, peers)
    known = await known_speeds(options, checkpoint, peers)
    is_fixed = cluster.order == "fixed"
    replan = Replan(spec, known, is_fixed, may_be_alone, options.objective, options.num_requests)
    if cluster.layers is not None:
        return plan_largest(spec, nodes, contexts, cluster.layers), replan
    plan = replan(nodes, contexts)
    members = {assignment.name for assignment in plan.assignments}
    if left_out := [node.name for node in nodes if node.name not in members]:
        say(f"without {' and '.join(left_out)}, which would not make it faster: `brigade plan` has the figures")
    return plan, replan


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
    """The whole way: workers found or started, planned, refused if it does not fit, loaded, joined.

    A chain that is lost stays lost: what is measured on it must not go on on another one. Whoever has
    several chains open at once gives all of them this process's MLX thread. Of the workers at least one takes part,
    or `every_node`, even where this node alone would be faster.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            peers = await stack.enter_async_context(open_peers(options, spec))
            progress("", ASKING)
            if every_node or options.cluster.layers is not None:
                plan = await make_plan(options.cluster, spec, peers, context)
            else:
                plan, _ = await choose_plan(options, checkpoint, spec, peers, context, may_be_alone=False)
            require_fit(plan, spec)
            deployment = _deployment(options, checkpoint, spec, plan, peers)
            chain = await stack.enter_async_context(joined(deployment, progress, say=say, thread=thread))
        yield chain


@asynccontextmanager
async def open_cluster(
    options: ClusterOptions, checkpoint: Checkpoint, spec: ModelSpec, context: int | Contexts
) -> AsyncIterator[Supervisor]:
    """The same for requests, which outlive chains: a lost one is opened again, over whichever nodes there are."""
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            roster = await stack.enter_async_context(open_roster(options, spec))
            progress("", ASKING)
            if options.local and options.limits.recovery_s:
                await roster.wait_all(options.limits.recovery_s)
            opening = supervised(options, checkpoint, spec, context, roster, roster.peers(roster.members), progress)
            supervisor = await stack.enter_async_context(opening)
        yield supervisor


@asynccontextmanager
async def supervised(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    context: int | Contexts,
    roster: Roster,
    peers: Sequence[Peer],
    progress: Progress = lambda node, report: None,
    say: Callable[[str], None] = say,
    thread: MlxThread | None = None,
) -> AsyncIterator[Supervisor]:
    """The first chain over these peers; others of the roster are there for the next one.

    Whoever opens several clusters gives all of them this process's MLX thread.
    """
    plan, replan = await choose_plan(options, checkpoint, spec, peers, context)
    require_fit(plan, spec)
    deployment = _deployment(options, checkpoint, spec, plan, peers)
    least = context.least if isinstance(context, Contexts) else plan.context
    async with (
        OwnNode(thread, keeps_to_plan=thread is None) as own,
        Supervisor(own, roster, deployment, options.limits, say=say, least_context=least, replan=replan) as supervisor,
    ):
        await supervisor.open(progress)
        yield supervisor


@asynccontextmanager
async def joined(
    deployment: Deployment,
    progress: Progress = lambda node, report: None,
    *,
    say: Callable[[str], None] = lambda line: None,
    thread: MlxThread | None = None,
) -> AsyncIterator[Chain]:
    """Every shard loaded, and the first chain over them."""
    async with OwnNode(thread) as own:
        await own.load(deployment, progress)
        async with Chain(own, deployment, say=say) as chain:
            await chain.open(progress)
            yield chain


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
