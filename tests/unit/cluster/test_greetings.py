"""What the workers' answers to the first question tell the coordinator's user."""

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from coordinator.cluster.nodes import Nodes
from coordinator.cluster.peer import Peer, differences, greet
from protos.brigade_pb2 import Configuration, HelloReply
from worker.config import ClusterConfig
from worker.errors import ModelError, StageLost
from worker.node.configuration import configuration_of
from worker.node.network import PROTOCOL_VERSION

OURS = ClusterConfig(model="org/model", layers=(4, 2), context=4096)
SAME = Configuration(model="org/model", layers=[4, 2], context=4096)
ANOTHER = "worker mini has another configuration: "


def reply(configuration: Configuration | None = None, **changes: str) -> HelloReply:
    fields: dict[str, Any] = {"node": "mini", "mlx_version": version("mlx"), "mlx_lm_version": version("mlx-lm")}
    return HelloReply(configuration=configuration, **(fields | changes))


@pytest.mark.parametrize(
    ("greeting", "lines"),
    [
        (reply(), []),
        (reply(node="worker-50070"), []),  # started without --name: nobody chose that name
        (reply(Configuration(name="mini")), []),
        (reply(SAME), []),
        (reply(Configuration()), []),
        (reply(SAME, mlx_version="0.1"), [f"worker mini has mlx 0.1, this node {version('mlx')}"]),
        (reply(SAME, mlx_lm_version="0.2"), [f"worker mini has mlx-lm 0.2, this node {version('mlx-lm')}"]),
        (reply(Configuration(name="air")), ["worker mini calls itself air: one of both has the wrong name or address"]),
        (
            reply(Configuration(model="demo", layers=[3, 3], context=512)),
            [
                f"{ANOTHER}model is demo there, org/model here",
                f"{ANOTHER}layers is [3, 3] there, [4, 2] here",
                f"{ANOTHER}context is 512 there, 4096 here",
            ],
        ),
    ],
)
def test_what_may_surprise_somebody_is_told_in_a_line_each(greeting: HelloReply, lines: list[str]) -> None:
    assert list(differences("mini", OURS, greeting)) == lines


def test_a_certificate_that_expires_soon_is_told_with_what_renews_it() -> None:
    until = int((datetime.now(UTC) + timedelta(days=9, hours=1)).timestamp())
    greeting = reply()
    greeting.certificate_expires = until
    by_hand, launched = "where the authority is: brigade keys issue mini", "from here: brigade launch mini --config "
    for ssh, fix in (({}, by_hand), ({"ssh": "mini"}, launched)):
        cluster = ClusterConfig.model_validate({"workers": [{"name": "mini", "address": "127.0.0.1:1", **ssh}]})
        [line] = differences("mini", cluster, greeting)
        assert line.startswith("the certificate of mini expires in 9 days, on 20") and f"; {fix}" in line


def test_each_key_that_counts_on_a_coordinator_is_compared() -> None:
    def configured(order: str, name: str, port: int, memory: str, *more: dict[str, str]) -> ClusterConfig:
        workers = [{"name": "mini", "address": f"127.0.0.1:{port}", "memory": memory}, *more]
        return ClusterConfig.model_validate({"order": order, "coordinator": {"name": name}, "workers": workers})

    theirs = configured("free", "studio", 1, "1GiB")
    ours = configured("fixed", "max", 2, "9GiB", {"name": "air", "address": "127.0.0.1:9", "memory": "2GiB"})
    assert list(differences("mini", ours, reply(configuration_of(theirs)))) == [
        f"{ANOTHER}coordinator.name is studio there, max here",
        f"{ANOTHER}order is free there, fixed here",
        f"{ANOTHER}workers[mini].memory is 1.0 GiB there, 9.0 GiB here",
    ]
    assert not list(differences("mini", ours, reply(configuration_of(ours))))


def test_a_key_that_only_the_worker_sets_is_compared_with_the_default() -> None:
    usual = {"order": "free", "objective": "latency", "coordinator": {"name": "coordinator"}}
    other = {"context": 512, "layers": [2, 6], "objective": "prompt", "coordinator": {"memory": "1GiB"}}
    for keys, told in (
        (usual | {"model": "demo"}, []),  # the coordinator may have its model from a flag
        ({"workers": [{"name": "mini", "address": ["10.0.0.7:1"], "memory": "1GiB"}]}, []),  # counts: none is set here
        (
            other,
            [
                "layers is [2, 6] there, unset here",
                "context is 512 there, unset here",
                "coordinator.memory is 1.0 GiB there, unset here",
                "objective is prompt there, latency here",
            ],
        ),
    ):
        theirs = configuration_of(ClusterConfig.model_validate(keys), "mini")
        lines = list(differences("mini", ClusterConfig(), reply(theirs)))
        assert lines == [f"{ANOTHER}{line}" for line in told]
        assert not list(differences("mini", ClusterConfig.model_validate(keys), reply()))


def test_what_another_node_says_is_told_in_so_many_lines_of_plain_text() -> None:
    many = {f"{i}\x1b[2J": f"{i}\x1b[2J" for i in range(9)}
    lines = list(differences("mini", OURS, reply(Configuration(others=many))))
    assert len(lines) == 6 and lines[-1] == f"{ANOTHER}4 more keys differ"
    assert lines[0] == f"{ANOTHER}0\N{REPLACEMENT CHARACTER}[2J is 0\N{REPLACEMENT CHARACTER}[2J there, unset here"
    [line] = differences("mini", OURS, reply(Configuration(model="m" * 9999)))
    assert len(line) < 300


@pytest.mark.parametrize(("days", "is_told"), [(40, False), (12, True)])
def test_a_workers_certificate_that_soon_expires_is_told(days: int, is_told: bool) -> None:
    greeting = reply(SAME)
    greeting.certificate_expires = int(time.time()) + days * 86400 + 600
    lines = list(differences("mini", OURS, greeting))
    assert bool(lines) == is_told
    assert all(re.match(r"the certificate of mini expires in 12 days, .*: brigade keys issue mini$", x) for x in lines)


async def test_each_process_of_a_worker_is_compared_once_whenever_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (reply(SAME, incarnation=each, mlx_version=each) for each in ("0.1", "0.2"))
    old.protocol_version = new.protocol_version = PROTOCOL_VERSION
    race = SimpleNamespace(ask=AsyncMock(side_effect=[old, old, new, new]))
    monkeypatch.setattr("coordinator.cluster.peer.AddressRace", lambda *given: race)
    said: list[str] = []
    network: Any = None
    peer = Peer("mini", ["192.0.2.1:1"], network, said.append, OURS)
    for lines in (1, 1, 2, 2):
        await peer.hello()
        assert len(said) == lines
    assert said == [f"warning: worker mini has mlx 0.{i}, this node {version('mlx')}" for i in (1, 2)]


async def test_a_worker_has_the_memory_that_its_process_offered_first() -> None:
    """Free memory changes all the time, and layers are loaded anew for another budget."""
    offers = [("1", 500), ("1", 400), ("1", 600), ("2", 300)]
    replies = [HelloReply(node="mini", incarnation=process, memory_bytes=offered) for process, offered in offers]
    peer: Any = SimpleNamespace(
        name="mini", address="192.0.2.1:1", hello=AsyncMock(side_effect=replies), close=AsyncMock()
    )
    budgets = []
    async with Nodes([peer]) as nodes:
        for _ in offers:
            await nodes.ask(["mini"], 1.0)
            budgets.append(nodes.workers["mini"].memory_bytes)
    assert budgets == [500, 500, 500, 300]


OLD, GONE, AWAY = (
    ModelError("speaks protocol 2", node="a"),
    StageLost("nothing answers", node="b"),
    StageLost("nothing answers", node="c"),
)


@pytest.mark.parametrize(
    ("outcomes", "kind", "lines"),
    [
        ((reply(), OLD), ModelError, ["speaks protocol 2"]),
        ((GONE, reply(), AWAY), StageLost, ["worker b: nothing answers", "worker c: nothing answers"]),
        ((OLD, GONE), StageLost, ["worker a: speaks protocol 2", "worker b: nothing answers"]),
        ((OLD, OLD), ModelError, ["worker a: speaks protocol 2"] * 2),
        ((GONE, KeyError("x")), KeyError, ["'x'"]),  # a bug is not taken for a missing worker
    ],
)
def test_workers_that_cannot_take_part_are_named_in_a_line_each(
    outcomes: tuple[HelloReply | BaseException, ...], kind: type[Exception], lines: list[str]
) -> None:
    def ask(*outcomes: HelloReply | BaseException) -> list[HelloReply]:
        return asyncio.run(greet([SimpleNamespace(hello=AsyncMock(side_effect=[each])) for each in outcomes]))  # type: ignore[misc]

    assert [greeting.node for greeting in ask(reply(node="a"), reply(node="b"))] == ["a", "b"] and ask() == []
    with pytest.raises(kind) as caught:
        ask(*outcomes)
    assert caught.value is outcomes[1] if len(lines) == 1 else str(caught.value).splitlines() == lines
