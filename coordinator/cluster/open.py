"""From a configuration to a running chain: the nodes, the plan, and everything opened and closed in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.local import LocalWorker
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import COORDINATOR_ID, Peer, greet, peers_of, raise_worst
from coordinator.cluster.progress import ASKING, STARTING, NodeProgress, say, show_progress
from coordinator.cluster.recovery_record import Recovered
from coordinator.cluster.survey import known_speeds
from coordinator.planning import planner
from coordinator.planning.plan import (
    MemoryOffer,
    Node,
    Objective,
    Plan,
    budgets,
    check_split,
    require_fit,
    without_room,
)
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NO_SPEEDS, Survey
from protos.brigade_pb2 import Coordinator
from worker.config import NO_DRAFTER, ClusterConfig, is_here
from worker.drafters.draft_head import HeadPart
from worker.drafters.kinds import build_part
from worker.errors import BrigadeError, ConfigError, InputError, ModelError
from worker.model.build import build
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe, describe_model
from worker.model.draft_heads import check_head, own_head
from worker.model.families import is_tested
from worker.model.model_spec import ModelSpec
from worker.model.module_tree import final_norm, module_tree_of
from worker.node.loading import open_checkpoint
from worker.node.network import Network
from worker.platform.machine import kept_awake, memory_budget
from worker.platform.threads import MlxThread, run_in_thread

_PAUSE_S = 0.5  # between two rounds of questions
_ROUND_S = 1.0  # for one of them: a refusal is reported while other workers are still awaited
NO_RECOVERY = Limits(rejoin_s=0.0, recovery_s=0.0)  # the first error is final


@asynccontextmanager
async def open_nodes(options: ClusterOptions, spec: ModelSpec, *, keep: bool = True) -> AsyncIterator[Nodes]:
    """Open the workers: `local` processes of our own, started again when they end (`keep`), or the configured ones.

    Raises:
        ConfigError: the model cannot be split over so many nodes; none is started then.
    """
    check_split(spec, 1 + options.num_workers, options.cluster.layers)
    async with AsyncExitStack() as stack:
        network, local = Network(), []  # of local workers, on loopback
        if options.local is None:
            network = Network.of(options.cluster, warn=lambda line: say(f"warning: {line}"))
            peers = [Peer(each.name, each.addresses, network, say, options.cluster) for each in options.cluster.workers]
        else:
            local = await start_local(options.worker_names, options.model, stack, options.draft_model)
            peers = [Peer(worker.name, [worker.address], network) for worker in local]
        async with Nodes(peers, options.cluster) as nodes:
            if keep:
                nodes.keep(local, network, say)
            yield nodes


@asynccontextmanager
async def open_peers(options: ClusterOptions, spec: ModelSpec) -> AsyncIterator[list[Peer]]:
    """Open the workers, and do not start any again. Raises ConfigError as `open_nodes` does."""
    async with open_nodes(options, spec, keep=False) as nodes:
        yield nodes.peers(nodes.workers)


async def read_model(model: str, draft_model: str | None = None) -> tuple[Checkpoint, ModelSpec]:
    """Read a model's configuration and headers only; warns if no test covers its type.

    Args:
        draft_model: what is to draft for it: a small model, a draft head, or NO_DRAFTER. None: the head in its own
            folder, if there is one that can be used.
    Raises:
        ModelError: it is missing, damaged, or not supported. InputError: the other one cannot draft for it.
    """
    return await run_in_thread(partial(_read_model, model, draft_model))


def _read_model(model: str, draft_model: str | None) -> tuple[Checkpoint, ModelSpec]:
    checkpoint = open_checkpoint(model)
    spec = describe_model(checkpoint)
    if draft_model and draft_model != NO_DRAFTER:
        checkpoint = with_drafter(checkpoint, open_checkpoint(draft_model))
        check_drafter(checkpoint)
    elif not draft_model and (head := own_head(checkpoint)):
        try:
            both = with_drafter(checkpoint, head)
            check_drafter(both)
            checkpoint = both
        except (ModelError, InputError) as error:
            say(f"note: {spec.name} runs without its own draft head: {error.message}")
    if not is_tested(checkpoint.config):
        say(f"note: no test has seen a {spec.family} model yet; compare with `brigade verify` before you rely on it")
    return checkpoint, describe(checkpoint)


def with_drafter(checkpoint: Checkpoint, drafter: Checkpoint) -> Checkpoint:
    """Return the model with what is to draft for it. Raises ModelError if the drafter is damaged or not supported."""
    both = replace(checkpoint, drafter=drafter)
    return replace(both, embeds_last=describe(both).serves_head)


def check_drafter(checkpoint: Checkpoint) -> None:
    """Check that the drafter fits the model. Raises InputError if it does not."""
    spec = describe(checkpoint)
    small, drafter = spec.drafter, checkpoint.drafter
    assert small is not None and drafter is not None
    if small.head:
        try:
            check_head(small.head, small.name, spec)
            part = build_part(drafter, 0, small.num_layers, None)
            assert isinstance(part, HeadPart)
            part.check_ids(spec.vocab_size)
            if spec.serves_head:
                final_norm(module_tree_of(build(checkpoint)))
        except ModelError as error:
            raise InputError("draft_model", error.message) from error
        return
    if not small.can_take_back:
        raise InputError("draft_model", f"{small.name} has a state outside of its layers, which cannot return to one")
    ours, theirs = checkpoint.vocabulary(), drafter.vocabulary()
    other = next((token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]), None)
    found = "" if other is None else f" (the first difference: token {other}, {ours[other]!r} and {theirs[other]!r})"
    if found or (not (ours and theirs) and checkpoint.fingerprint.tokenizer != drafter.fingerprint.tokenizer):
        raise InputError("draft_model", f"expected the tokenizer of {spec.name}, {small.name} has another one{found}")


async def ask_nodes(cluster: ClusterConfig, peers: Sequence[Peer]) -> list[Node]:
    """Return all nodes with their memory budgets: the configured ones, else what each node offers itself.

    Raises:
        BrigadeError: as `greet`.
    """
    greetings = await greet(peers)
    configured = {address: worker.memory for worker in cluster.workers for address in worker.addresses}
    theirs = (
        MemoryOffer(greeting.memory_bytes, configured.get(peer.address), is_here(peer.address))
        for peer, greeting in zip(peers, greetings, strict=True)
    )
    names = [cluster.coordinator.name, *(peer.name for peer in peers)]
    return list(map(Node, names, budgets(MemoryOffer(memory_budget(), cluster.coordinator.memory), theirs)))


def note_context(options: ClusterOptions, spec: ModelSpec) -> None:
    """Say so if a longer context was asked for than the model has."""
    if options.given_context and options.given_context > spec.context:
        say(f"note: planned for {spec.context} tokens: {spec.name} has no room for {options.given_context}")


async def choose_plan(
    options: ClusterOptions, checkpoint: Checkpoint, peers: Sequence[Peer]
) -> tuple[Plan, Survey, Objective]:
    """Ask every node what it offers and plan. Workers that make nothing faster are left out.

    Returns:
        The plan, and the speeds and the objective for later plans.
    Raises:
        ConfigError: `layers` does not suit the model and the nodes. StageLost: a node is missing.
    """
    spec, nodes = describe(checkpoint), await ask_nodes(options.cluster, peers)
    note_context(options, spec)
    speeds = await known_speeds(options, checkpoint, peers) if options.by_speed else NO_SPEEDS
    objective = options.objective_of(spec)
    plan = await run_in_thread(partial(planner.plan, spec, nodes, speeds, objective))
    if options.objective == "prompt" and (why := planner.why_not_shared(spec, nodes, speeds, objective, plan)):
        say(f"note: planned by latency, not for prompts: {why}")
    left_out = [node for node in nodes if node.name not in plan.names]
    is_by_speed = speeds.covers(each.name for each in nodes)
    small = without_room(spec, left_out, objective) if is_by_speed else [node.name for node in left_out]
    slow = [node.name for node in left_out if node.name not in small]
    for names, why in ((small, "for lack of memory"), (slow, "which would not make it faster")):
        if names:
            say(f"without {' and '.join(names)}, {why}: `brigade plan` has the figures")
    return plan, speeds, objective


@asynccontextmanager
async def open_chain(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    thread: MlxThread | None = None,
    *,
    every_node: bool = False,
) -> AsyncIterator[Chain]:
    """Open one chain over the workers, at least one of them, or `every_node`, even if this node is faster alone.

    A lost chain stays lost: a measurement must not continue on another one. If several chains are open at once, all of
    them need this process's one MLX thread.

    Raises:
        BrigadeError: what the first node that cannot take part says.
    """
    by_speed = not every_node and options.cluster.layers is None
    options = replace(options, limits=NO_RECOVERY, by_speed=by_speed, may_be_alone=False, needs_all=every_node)
    async with open_cluster(options, checkpoint, thread=thread) as cluster:
        yield cluster.chain


@asynccontextmanager
async def open_cluster(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    *,
    thread: MlxThread | None = None,
    on_recovered: Callable[[Recovered], None] = lambda recovered: None,
) -> AsyncIterator[Cluster]:
    """Open a cluster for requests, which outlive chains: a lost chain is opened again over the nodes that are there.

    Workers that do not answer for a while are left out, if the model fits on the others, and join later.

    Args:
        thread: this process's MLX thread, needed if it has several chains.
        on_recovered: takes a report when a recovery has ended.
    Raises:
        BrigadeError: what the first node that cannot take part says.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(kept_awake())
        with show_progress() as progress:
            progress("", STARTING if options.local else ASKING)
            recovers = bool(options.limits.recovery_s)
            nodes = await stack.enter_async_context(open_nodes(options, describe(checkpoint), keep=recovers))
            progress("", ASKING)
            if recovers:  # our own that end are started again
                await _wait_for_workers(nodes, options.limits.recovery_s if options.local else options.limits.arrival_s)
            missing = [each.name for each in nodes.workers.values() if recovers and not each.answers]
            peers = nodes.peers(name for name in nodes.workers if name not in missing)
            opening = cluster_over(
                *(nodes, peers, options, checkpoint, progress),
                missing=missing,
                thread=thread,
                on_recovered=on_recovered,
            )
            cluster = await stack.enter_async_context(opening)
        yield cluster


async def _wait_for_workers(nodes: Nodes, arrival_s: float) -> None:
    """Return once all workers answer, or no further one has begun to for so long.

    Raises:
        BrigadeError: a worker is there, and cannot take part; at once, though others may still be awaited.
    """
    missing, has_said = list(nodes.workers), False
    arrived_at = time.monotonic()
    while missing and (left_s := arrived_at + arrival_s - time.monotonic()) > 0:
        await nodes.ask(missing, min(left_s, _ROUND_S))
        raise_worst([worker.refusal for worker in nodes.workers.values()])
        still = [name for name in missing if not nodes.workers[name].answers]
        if len(still) < len(missing):
            arrived_at = time.monotonic()
        missing = still
        if missing:
            if not has_said:
                say(f"waiting for {' and '.join(missing)}, {arrival_s:g} s at most")
                has_said = True
            await nodes.pause(min(_PAUSE_S, arrival_s))


@asynccontextmanager
async def cluster_over(
    nodes: Nodes,
    peers: Sequence[Peer],
    options: ClusterOptions,
    checkpoint: Checkpoint,
    progress: NodeProgress = lambda node, report: None,
    *,
    missing: Sequence[str] = (),
    say: Callable[[str], None] = say,
    thread: MlxThread | None = None,
    on_recovered: Callable[[Recovered], None] = lambda recovered: None,
) -> AsyncIterator[Cluster]:
    """Open the first chain over these peers; other workers are spare, except those that are `missing` for now.

    If several clusters are open at once, all of them need this process's one MLX thread.
    """
    layers = options.cluster.layers
    given = options.with_layers(None) if missing else options
    try:
        plan, speeds, objective = await choose_plan(given, checkpoint, peers)
        require_fit(plan, describe(checkpoint))
    except ConfigError:
        raise_worst([nodes.workers[name].trouble for name in missing])
        raise
    if missing:
        names = " and ".join(missing)
        troubles = "; ".join(str(nodes.workers[name].trouble or f"worker {name}: does not answer") for name in missing)
        say(f"going on without {names}, since the model fits on the others: {troubles}")
        if layers is not None:
            counts, is_one = ",".join(map(str, layers)), len(missing) == 1
            state, until = ("is missing", "it joins") if is_one else ("are missing", "they join")
            say(f"layers {counts} need every node, and {names} {state}: split as {plan} until {until}")
    deployment = Deployment(
        *(checkpoint, plan, nodes.peers(plan.names[1:]), options.check_finite, options.feeds),
        prefix_bytes=options.cluster.cache_disk or 0,
        naming_secret=options.naming_secret,
    )
    async with (
        OwnNode(thread, keeps_to_plan=thread is None and bool(options.limits.recovery_s)) as own,
        Cluster(
            *(own, nodes, deployment, options.limits),
            say=say,
            on_recovered=on_recovered,
            speeds=speeds,
            measure=partial(known_speeds, options, checkpoint) if options.by_speed else None,
            objective=replace(objective, layers=layers),
            missing=missing,
        ) as cluster,
    ):
        await cluster.open(progress)
        yield cluster


async def start_local(
    names: Sequence[str], model: str, stack: AsyncExitStack, draft_model: str | None = None
) -> list[LocalWorker]:
    """Start worker processes of these names for this model; the stack ends them."""
    starts = [asyncio.create_task(LocalWorker.start(name, model, draft_model)) for name in names]

    async def stop_all() -> None:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in outcomes if isinstance(worker, LocalWorker)))

    stack.push_async_callback(stop_all)
    return list(await asyncio.gather(*starts))


async def unload_workers(options: ClusterOptions) -> None:
    """Have all configured workers free their memory; report those that do not. Our own processes have ended already."""
    if options.local is not None:
        return
    own = Coordinator(id=COORDINATOR_ID, name=options.cluster.coordinator.name)
    try:
        async with peers_of(options.cluster, Network.of(options.cluster)) as peers:
            await asyncio.gather(*(_unload(peer, own) for peer in peers))
    except ConfigError as error:  # this node's certificate has expired, for example
        say(f"{error}; the workers keep what they hold")


async def _unload(peer: Peer, coordinator: Coordinator) -> None:
    try:
        await peer.hello()  # finds the address at which it answers
        await peer.unload(coordinator)
    except BrigadeError as error:
        say(f"{error}; what it holds stays there")
