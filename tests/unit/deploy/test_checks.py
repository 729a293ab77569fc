"""What doctor says of facts: each problem, each note, and nothing where all is in order."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.deploy.checks import ModelInUse
from coordinator.deploy.doctor import Examination
from coordinator.deploy.findings import ExaminedCluster, ExaminedHop, ExaminedNode, Finding, Kind, Level
from coordinator.planning.plan import Objective
from coordinator.planning.speeds import NodeSpeed
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_WIFI,
    TRANSPORT_TCP,
    Configuration,
    Facts,
    Interface,
    Line,
    LinkReply,
    Power,
    ThunderboltPort,
    Way,
)
from tests.unit.deploy.cases import (
    GIB,
    MINI,
    NOW,
    STUDIO,
    VERSIONS,
    bridge,
    hop,
    judged,
    known,
    model,
    node,
    port,
    said,
    worse,
)
from worker.errors import (
    CLOSED_AT_ONCE,
    NO_WORKER,
    CallerRefused,
    ConfigError,
    ModelError,
    NodeSilent,
    StageLost,
    Unanswered,
)
from worker.node.certificates import Role
from worker.node.network import Network

PROBLEM, NOTE, OK = Level.PROBLEM, Level.NOTE, Level.OK
WIFI = bridge("192.168.1.2", MEDIUM_WIFI, name="en0")
FAR_WIFI = bridge("192.168.1.9", MEDIUM_WIFI, name="en0")
LAN = bridge("192.168.1.3", MEDIUM_ETHERNET, name="en7")
VPN = bridge("10.0.0.1", MEDIUM_TUNNEL, name="x0")


def days(count: int) -> int:
    return int((NOW + timedelta(days=count, hours=1)).timestamp())


@pytest.mark.parametrize(
    ("times", "end"),
    [
        (((1, 2.0),), "with 1 row"),
        (((1, 2.0), (4, 2.1)), "with 4: up to 4 rows take about as long as one"),
        (((1, 2.0), (4, 4.0)), "with 4: 4 rows take 2.0 x as long as one"),
    ],
)
def test_rows_that_were_measured_are_compared_with_one(times: tuple[tuple[int, float], ...], end: str) -> None:
    measured = replace(node(), speed=NodeSpeed((times,), times, 100.0))
    [found] = [each for each in judged(known(measured)) if each.kind == Kind.ROWS]
    assert found.text.endswith(end)


def test_two_macs_in_order_get_no_word_but_ok() -> None:
    findings = judged(known(node(), hops=[hop()]))
    assert worse(findings) == [] and all(each.fix == "" for each in findings)
    assert {each.kind for each in findings} >= {
        Kind.MACHINE, Kind.DISK, Kind.CERTIFICATE, Kind.CLOCK, Kind.SLEEP, Kind.APP_NAP, Kind.FIREWALL, Kind.RDMA,
        Kind.INTERFACE, Kind.THUNDERBOLT, Kind.SPEED, Kind.GRPC, Kind.CHAIN, Kind.MEMORY,
    }  # fmt: skip


def test_every_kind_of_finding_is_on_the_page_about_doctor() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
    sections = re.findall(r"^### `([\w-]+)`\n\nLevels: (.*)\n\n\S", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in sections} == {kind.value for kind in Kind}
    assert {level for _, levels in sections for level in levels.split(", ")} == {"ok", "note", "problem"}


@pytest.mark.parametrize(
    ("changed", "level", "kind", "words"),
    [
        ({"free_disk_bytes": GIB // 2}, PROBLEM, Kind.DISK, "512.0 MiB free"),
        ({"free_disk_bytes": 10 * GIB}, NOTE, Kind.DISK, "10.0 GiB free"),
        ({"certificate_expires": days(3)}, PROBLEM, Kind.CERTIFICATE, "in 3 days"),
        ({"certificate_expires": days(20)}, NOTE, Kind.CERTIFICATE, "in 20 days"),
        ({"power": Power(sleep_minutes=10)}, NOTE, Kind.SLEEP, "falls asleep after 10 min"),
        ({"power": Power(sleep_minutes=10, is_kept_awake=True)}, OK, Kind.SLEEP, "keep it awake"),
        ({"power": Power(sleep_minutes=0, may_nap=True)}, NOTE, Kind.APP_NAP, "App Nap may slow"),
        ({"firewall": "blocks all"}, NOTE, Kind.FIREWALL, "blocks all"),
        ({"firewall": "blocks this program"}, NOTE, Kind.FIREWALL, "blocks this program"),
        ({"firewall": "on"}, OK, Kind.FIREWALL, "is on"),
        ({"unread": ["pmset"]}, NOTE, Kind.UNREAD, "pmset"),
        ({"versions": VERSIONS | {"brigade": "0.2.0"}}, PROBLEM, Kind.BRIGADE, "0.2.0, the coordinator 0.1.0"),
        ({"code": "old", "is_outdated": True}, PROBLEM, Kind.BRIGADE, "replaced on disk after it was started"),
        ({"is_outdated": True}, PROBLEM, Kind.BRIGADE, "replaced on disk after it was started"),
        ({"code": "other"}, NOTE, Kind.BRIGADE, "other files of it"),
        ({"versions": VERSIONS | {"mlx": "0.31.0"}}, NOTE, Kind.MLX, "has mlx 0.31.0, the coordinator 0.32.4"),
        ({"versions": VERSIONS | {"mlx-lm": "0.31.0"}}, NOTE, Kind.MLX, "has mlx-lm 0.31.0"),
        ({"versions": VERSIONS | {"python": "3.11.9"}}, NOTE, Kind.PYTHON, "runs Python 3.11.9"),
        ({"wired_limit_mb": 57344}, OK, Kind.MACHINE, "iogpu.wired_limit_mb is 57344"),
        ({"rdma": "enabled", "rdma_devices": ["rdma_en2"]}, OK, Kind.RDMA, "is enabled (rdma_en2)"),
        ({"rdma": ""}, OK, Kind.RDMA, "could be enabled"),
        ({"system_version": "15.5"}, OK, Kind.RDMA, "no RDMA"),
        ({"thunderbolt": [port("mini", "studio", 40.0)]}, OK, Kind.RDMA, "no RDMA"),  # nobody is sent to Recovery
    ],
)
def test_what_is_said_of_a_node(changed: dict[str, Any], level: Level, kind: Kind, words: str) -> None:
    findings = judged(known(node(**changed)))
    found = said(findings, kind, "mini")
    assert (found.level, bool(found.fix)) == (level, level is not OK) and words in found.text
    assert worse(findings) == ([(level, kind, "mini")] if level is not OK else [])


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"model": "small"}, ["`model: small`; the coordinator's counts, in which it is big"]),
        ({"layers": [1, 3], "context": 100}, ["`layers: [1, 3]`", "`context: 100`"]),
        ({"others": {"order": "fixed", "coordinator.memory": "1.0 GiB"}}, ["memory: 1.0 GiB`", "`order: fixed`"]),
        ({"others": {f"a{i}": "1" for i in range(7)}}, [*(f"a{i}" for i in range(5)), "2 more keys"]),
        ({}, []),
    ],
)
def test_a_configuration_that_differs_is_noted(theirs: dict[str, Any], words: list[str]) -> None:
    ours = Configuration(model="big", layers=[2, 2], context=200, others={"order": "free"})
    studio = replace(node("studio", STUDIO), configuration=ours)
    findings = judged(known(replace(node(), configuration=Configuration(**theirs)), studio=studio))
    assert worse(findings) == [(NOTE, Kind.CONFIGURATION, "mini")] * len(words)
    found = [each.text for each in findings if each.kind is Kind.CONFIGURATION]
    assert all(word in text for word, text in zip(words, found, strict=True))


LAUNCH = "from here: brigade launch mini"


@pytest.mark.parametrize(
    ("mini", "kind", "by_hand"),
    [
        (replace(node(), configuration=Configuration(model="small")), Kind.CONFIGURATION, "and start it again"),
        (node(certificate_expires=days(3)), Kind.CERTIFICATE, "brigade keys issue mini, and copy the file to it"),
        (node(versions=VERSIONS | {"brigade": "0.2.0"}), Kind.BRIGADE, "install the same version"),
        (node(code="other"), Kind.BRIGADE, "from the same sources"),
        (node(versions=VERSIONS | {"mlx": "0.31.0"}), Kind.MLX, "pip install mlx==0.32.4"),
        (ExaminedNode("mini", error=ModelError("speaks protocol 2")), Kind.BRIGADE, "install the same version"),
        (ExaminedNode("mini", error=ConfigError("distrusted")), Kind.CERTIFICATE, "brigade keys issue mini"),
    ],
)  # fmt: skip
def test_what_a_launch_sends_is_not_to_be_copied_to_a_launched_worker(
    mini: ExaminedNode, kind: Kind, by_hand: str
) -> None:
    """It reads its configuration only when it starts, from a file of its own with its own folder of keys."""
    assert by_hand in said(judged(known(mini)), kind, "mini").fix
    assert said(judged(known(replace(mini, start=LAUNCH, launch=LAUNCH))), kind, "mini").fix == LAUNCH


def test_a_launched_worker_that_hangs_is_to_be_restarted() -> None:
    mini = ExaminedNode("mini", error=NodeSilent("stopped answering"), start=LAUNCH, launch=LAUNCH)
    found = said(judged(known(replace(mini, ways=[Way(address="a:1")]))), Kind.UNREACHABLE)
    assert found.fix.endswith(f"; then {LAUNCH} --restart")


def test_a_worker_that_was_given_another_name_is_a_problem() -> None:
    for name, found in (("mini", []), ("", []), ("maxi", [(PROBLEM, Kind.CONFIGURATION, "mini")])):
        findings = judged(known(replace(node(), configuration=Configuration(name=name))))
        assert worse(findings) == found, name
    assert "calls itself maxi" in said(findings, Kind.CONFIGURATION).text


def test_power_and_clock_of_a_node() -> None:
    power = Power(sleep_minutes=0, is_on_battery=True, is_saving=True, may_nap=False)
    findings = judged(known(node(power=power)))
    assert worse(findings) == [(NOTE, Kind.SLEEP, "mini")] * 2
    fixes = sorted(each.fix for each in findings if each.level is NOTE)
    assert fixes[0] == "connect power" and fixes[1].startswith("sudo pmset -a lowpowermode 0")
    studio = node("studio", STUDIO, power=Power(sleep_minutes=10, may_nap=False))
    assert worse(judged(known(node(), studio=studio))) == [], "commands keep the coordinator awake"
    for offset_s, level in ((-0.5, OK), (3.0, NOTE), (-3000.0, NOTE), (90_000.0, PROBLEM), (-1e6, PROBLEM)):
        found = said(judged(known(replace(node(), clock_offset_s=offset_s))), Kind.CLOCK)
        assert found.level is level and bool(found.fix) == (level is not OK)


LOST = StageLost("nothing answers")


@pytest.mark.parametrize(
    ("error", "way", "system", "kind", "words", "fix"),
    [
        (LOST, {"errno": 61, "error": "refused"}, "Darwin", Kind.UNREACHABLE, "no worker listens at a:1",
         "there: brigade worker --config home.yaml --name mini"),
        (LOST, {"errno": 65, "error": "No route"}, "Darwin", Kind.LOCAL_NETWORK, "errno 65", "Local Network"),
        (LOST, {"errno": 65, "error": "No package"}, "Linux", Kind.UNREACHABLE, "No package", "is it awake"),
        (LOST, {"error": "nothing within 3 s"}, "Darwin", Kind.UNREACHABLE, "nothing within 3 s", "is it awake"),
        (LOST, {"errno": -1, "error": "unknown"}, "Darwin", Kind.UNREACHABLE, "a:1: unknown", "correct `address:`"),
        (Unanswered("nothing answers", start="there: brigade worker"), {}, "Darwin", Kind.UNREACHABLE,
         "nothing answers, though connections are accepted", "or use another port; then there"),
        (NodeSilent("stopped answering"), {}, "Darwin", Kind.UNREACHABLE, "stopped", "wake or end it"),
        (StageLost(NO_WORKER), {}, "Darwin", Kind.UNREACHABLE, "no worker, perhaps", "correct the address"),
        (CallerRefused("expects TLS; set it"), {}, "Darwin", Kind.UNREACHABLE, "expects TLS", "set it"),
        (ConfigError("has expired"), {}, "Darwin", Kind.CERTIFICATE, "has expired", "brigade keys issue mini"),
        (ModelError("speaks protocol 2"), {}, "Darwin", Kind.BRIGADE, "protocol 2", "same version"),
    ],
)  # fmt: skip
def test_silence_is_a_finding(error: Any, way: dict[str, Any], system: str, kind: Kind, words: str, fix: str) -> None:
    studio = node("studio", STUDIO, system=system)
    start = Network(file="home.yaml").start_hint("mini")
    mini = ExaminedNode("mini", error=error, ways=[Way(address="a:1", **way)], start=start)
    findings = judged(known(mini, studio=studio))
    found = said(findings, kind, "mini")
    assert found.level is PROBLEM and words in found.text and fix in found.fix
    assert worse(findings) == [(PROBLEM, kind, "mini")]


def test_an_address_at_which_a_node_is_not_reached_is_noted_if_another_is_in_use() -> None:
    right = Way(address="192.168.1.2:1", local="192.168.1.1", remote="192.168.1.2")
    for errno, level, kind in ((64, NOTE, Kind.UNREACHABLE), (65, PROBLEM, Kind.LOCAL_NETWORK)):
        wrong = Way(address="169.254.1.2:1", errno=errno, error="No route to host")
        assert worse(judged(known(replace(node(), ways=[wrong, right])))) == [(level, kind, "mini")]


def over(near: Interface, far: Interface, **mini: Any) -> list[Finding]:
    """What is said of a hop by these two interfaces, beside the bridges."""
    studio = node("studio", STUDIO, interfaces=[bridge(STUDIO), near])
    mini = {"interfaces": [bridge(MINI), far]} | mini
    return judged(known(node(**mini), studio=studio, hops=[hop(local=near.addresses[0], remote=far.addresses[0])]))


@pytest.mark.parametrize(
    ("gbit", "most", "level", "words"),
    [
        (80.0, 120.0, OK, "80 Gb/s (Thunderbolt 5)"),
        (40.0, 40.0, OK, "40 Gb/s (Thunderbolt 3 or 4)"),
        (40.0, 120.0, NOTE, "though both can do 80"),
        (20.0, 40.0, NOTE, "20 Gb/s"),
    ],
)
def test_how_fast_the_cable_is(gbit: float, most: float, level: Level, words: str) -> None:
    def ports(own: str, peer: str) -> list[ThunderboltPort]:
        return [port(own, peer, gbit), ThunderboltPort(name="2", gbit=most, id=f"{own}-2")]

    studio, far = node("studio", STUDIO, thunderbolt=ports("studio", "mini")), node(thunderbolt=ports("mini", "studio"))
    found = said(judged(known(far, studio=studio, hops=[hop()])), Kind.THUNDERBOLT)
    assert found.level is level and words in found.text and bool(found.fix) == (level is NOTE)


def test_packet_sizes_that_do_not_go_together_and_slow_hops() -> None:
    for near, far, words in ((1500, 9000, "differ"), (1280, 1280, "are below 1500")):
        studio = node("studio", STUDIO, interfaces=[bridge(STUDIO, mtu=near)])
        findings = judged(known(node(interfaces=[bridge(MINI, mtu=far)]), studio=studio, hops=[hop()]))
        assert worse(findings) == [(NOTE, Kind.MTU, "studio → mini")] and words in said(findings, Kind.MTU).text
    for rtt_ms, bytes_per_s, level in (
        (0.5, 3e9, OK), (1.5, 3e9, NOTE), (0.5, 1e7, NOTE), (30.0, 3e9, PROBLEM), (30.0, 1e6, PROBLEM),
    ):  # fmt: skip
        assert said(judged(known(node(), hops=[hop(rtt_ms, bytes_per_s)])), Kind.SPEED).level is level


def test_what_a_hop_means_for_this_model() -> None:
    """8 KiB a token: half a round trip of 0.4 ms, and 8192 bytes at 1 GB/s."""
    findings = judged(known(node(), hops=[hop(0.4, 1e9), replace(hop(0.4, 1e9), is_back=True)]))
    there, back = (each.text for each in findings if each.kind is Kind.SPEED)
    figures = "ms of each token (round trip 0.40 ms, 1.0 GB/s by gRPC)"
    assert there.startswith(f"0.21 {figures}; 1,000 tokens of a prompt 8.39") and back == f"0.20 {figures}"
    assert said(findings, Kind.CHAIN).text.startswith("0.41 ms of each token")
    for rtt_ms, level in ((6.0, NOTE), (1.9, OK)):  # TCP takes 0.2 ms
        assert said(judged(known(node(), hops=[hop(rtt_ms)])), Kind.GRPC).level is level


def test_a_hop_that_leads_nowhere_or_failed_while_it_was_measured_is_a_problem() -> None:
    for errno, kind in ((65, Kind.LOCAL_NETWORK), (61, Kind.UNREACHABLE), (0, Kind.UNREACHABLE)):
        way = Way(address="10.0.0.2:50070", errno=errno, error="No route to host")
        findings = judged(known(node(), hops=[ExaminedHop("studio", "mini", LinkReply(way=way))]))
        assert worse(findings) == [(PROBLEM, kind, "studio → mini")]
    findings = judged(known(node(), hops=[ExaminedHop("studio", "mini", error=StageLost("closed the connection"))]))
    assert worse(findings) == [(PROBLEM, Kind.UNREACHABLE, "studio → mini")]


DRIVE = ThunderboltPort(name="1", gbit=80.0, is_connected=True, id="mini")  # no cable between two Macs


@pytest.mark.parametrize(
    ("near", "far", "has_cable", "level", "words"),
    [
        (WIFI, FAR_WIFI, True, PROBLEM, "takes Wi-Fi"),
        (WIFI, FAR_WIFI, False, NOTE, "takes Wi-Fi"),
        (LAN, FAR_WIFI, True, PROBLEM, "takes Ethernet (en7, MTU 1500), at mini Wi-Fi (en0, MTU 1500) though a"),
        (VPN, VPN, True, PROBLEM, "takes a VPN"),
        (VPN, VPN, False, NOTE, "takes a VPN"),
        (LAN, LAN, True, NOTE, "takes Ethernet"),
        (LAN, LAN, False, OK, "takes Ethernet"),
    ],
)
def test_a_cable_degrades_others(near: Interface, far: Interface, has_cable: bool, level: Level, words: str) -> None:
    findings = over(near, far, **({} if has_cable else {"thunderbolt": []}))
    found = said(findings, Kind.WIFI if far is FAR_WIFI else Kind.INTERFACE)
    assert found.level is level and words in found.text
    assert ("though a Thunderbolt cable is there" in found.text) == has_cable


def test_the_way_off_wifi_is_the_address_of_the_cable_or_of_one_ethernet_or_a_cable() -> None:
    found = said(over(WIFI, FAR_WIFI), Kind.WIFI)
    assert found.fix == f"put {MINI} and the port first in `address:` of mini in cluster.yaml, on both nodes"
    assert said(over(WIFI, FAR_WIFI, thunderbolt=[]), Kind.WIFI).fix.startswith("connect them by a Thunderbolt cable")
    assert said(over(WIFI, FAR_WIFI, thunderbolt=[DRIVE]), Kind.WIFI).level is PROBLEM
    studio = node("studio", STUDIO, interfaces=[WIFI], thunderbolt=[DRIVE])
    taken = hop(local=WIFI.addresses[0], remote=MINI)
    assert said(judged(known(node(), studio=studio, hops=[taken])), Kind.WIFI).level is NOTE
    bare = Interface(name="bridge0", medium=MEDIUM_THUNDERBOLT, mtu=1500)  # the cable has no address
    taken = hop(local=WIFI.addresses[0], remote=FAR_WIFI.addresses[0])
    studio = node("studio", STUDIO, interfaces=[bare, WIFI])
    found = said(judged(known(node(interfaces=[bare, FAR_WIFI]), studio=studio, hops=[taken])), Kind.WIFI)
    assert "Thunderbolt Bridge, TCP/IP" in found.fix
    studio = node("studio", STUDIO, interfaces=[WIFI, LAN], thunderbolt=[])
    for address, level in (("192.168.1.8", PROBLEM), ("10.0.0.8", NOTE)):
        far = node(interfaces=[FAR_WIFI, bridge(address, MEDIUM_ETHERNET)], thunderbolt=[])
        found = said(judged(known(far, studio=studio, hops=[taken])), Kind.WIFI)
        assert found.level is level and found.fix.startswith("put 192.168.1.8 ") == (level is PROBLEM)


def test_of_several_addresses_of_a_medium_the_one_on_a_network_of_the_sender_is_advised() -> None:
    taken = hop(local=WIFI.addresses[0], remote=FAR_WIFI.addresses[0])
    cable = bridge("10.99.0.1", name="en3")
    for near, far, advised, cables in (
        (LAN, [bridge("10.0.0.8", MEDIUM_ETHERNET), bridge("192.168.1.8", MEDIUM_ETHERNET)], "192.168.1.8", []),
        (cable, [bridge("10.98.0.2"), bridge("10.99.0.2")], "10.99.0.2", None),
        (cable, [bridge("10.97.0.2"), bridge("10.98.0.2")], "10.97.0.2", None),  # perhaps they share a wider network
    ):
        changed: dict[str, Any] = {} if cables is None else {"thunderbolt": cables}
        studio = node("studio", STUDIO, interfaces=[WIFI, near], **changed)
        mini = node(interfaces=[FAR_WIFI, *far], **changed)
        found = said(judged(known(mini, studio=studio, hops=[taken])), Kind.WIFI)
        assert found.level is PROBLEM and found.fix.startswith(f"put {advised} and the port first ")


def test_a_hop_whose_measurement_failed_is_noted_and_impossible_figures_are_not_believed() -> None:
    failed, closed = hop(), hop()
    failed.reply.lines[0].error = "timed out"
    findings = judged(known(node(), hops=[failed]))
    assert worse(findings) == [(NOTE, Kind.UNMEASURED, "studio → mini")]
    assert said(findings, Kind.UNMEASURED).text == "not measured: bare TCP: timed out"
    del closed.reply.lines[:]  # it opens no port: measured by gRPC alone
    assert worse(judged(known(node(), hops=[closed]))) == [(NOTE, Kind.UNMEASURED, "studio → mini")]
    for rtt_ms, bytes_per_s in ((float("nan"), 1.0), (-1.0, 0.0), (0.0, 0.0)):
        line = Line(transport=TRANSPORT_TCP, rtt_ms=float("nan"), bytes_per_s=float("inf"))
        reply = LinkReply(rtt_ms=rtt_ms, bytes_per_s=bytes_per_s, lines=[line])
        findings = judged(known(node(), hops=[ExaminedHop("studio", "mini", reply)]))
        assert {each.kind for each in findings if each.level is NOTE} == {Kind.UNMEASURED}
        assert not any("nan" in each.text for each in findings)
    far = ExaminedNode("mini", error=StageLost("nothing answers"), ways=[Way(address="a:1", errno=61, error="refused")])
    findings = judged(known(far, hops=[ExaminedHop("studio", "mini")]))
    assert worse(findings) == [(PROBLEM, Kind.UNREACHABLE, "mini"), (NOTE, Kind.UNMEASURED, "studio → mini")]


def fitted(nodes: ExaminedCluster, num_layers: int, layers: tuple[int, ...] | None = None) -> list[Finding]:
    return judged(nodes, ModelInUse(model(num_layers=num_layers), objective=Objective(4096, layers=layers)))


def test_the_wired_limit_is_to_be_raised_where_the_plan_needs_it_and_only_there() -> None:
    """90 GiB are offered, 96 needed: 48 each, of which 9 tenths of a limit are used."""
    findings = fitted(known(node()), 96)
    assert worse(findings) == [(PROBLEM, Kind.WIRED_LIMIT, "studio"), (PROBLEM, Kind.WIRED_LIMIT, "mini")]
    assert all(f"sysctl iogpu.wired_limit_mb={-(-48 * 1024 * 10 // 9)} " in each.fix for each in findings if each.fix)
    assert worse(fitted(known(node()), 90)) == []
    assert worse(fitted(known(node()), 90, (44, 46))) == [(PROBLEM, Kind.WIRED_LIMIT, "mini")]
    # neither where the configuration limits it, nor of another system
    studio = replace(node("studio", STUDIO), configured_bytes=45 * GIB)
    for changed in (replace(node(), configured_bytes=45 * GIB), node(system="Linux", working_set_bytes=0)):
        assert worse(fitted(known(changed, studio=studio), 96)) == [(PROBLEM, Kind.MEMORY, "all nodes")]
    # workers on the coordinator's machine share its memory
    here = known(replace(node(), is_here=True))
    assert worse(fitted(here, 44)) == [] and worse(fitted(here, 60)) == [(PROBLEM, Kind.MEMORY, "all nodes")]


def test_a_node_that_is_too_small_for_its_place_is_no_problem_while_the_others_hold_the_model() -> None:
    cluster = known(replace(node(), configured_bytes=GIB // 2))
    findings = fitted(cluster, 40)
    assert worse(findings) == [(NOTE, Kind.MEMORY, "all nodes")]
    assert "fits as studio [0, 40): no answer was tried" in said(findings, Kind.MEMORY).text
    assert worse(fitted(cluster, 40, (39, 1))) == [(PROBLEM, Kind.MEMORY, "all nodes")]
    here = known(replace(node(), configured_bytes=GIB // 2, is_here=True))
    assert worse(fitted(here, 40)) == [(NOTE, Kind.MEMORY, "all nodes")]


def test_a_model_that_does_not_fit_cannot_be_split_so_or_cannot_be_read_is_a_problem() -> None:
    findings = fitted(known(node()), 200)
    assert worse(findings) == [(PROBLEM, Kind.MEMORY, "all nodes")]
    assert "studio lacks" in said(findings, Kind.MEMORY).text
    assert said(fitted(known(node()), 4, (1, 1)), Kind.PLAN).level is PROBLEM
    findings = judged(known(node(), hops=[hop()]), ModelInUse(refusal="nowhere does not exist"))
    assert worse(findings) == [(PROBLEM, Kind.MODEL, "studio")]
    assert "prompt" not in said(findings, Kind.SPEED).text, "hops are told all the same"


def test_what_another_node_says_cannot_steer_a_terminal() -> None:
    evil = "²\x1b]0;owned\x07\x1b[2J\r\n\u202egnp\x9b" + "x" * 10_000
    facts = Facts(
        system="Darwin", system_version="²", chip=evil, cache_folder=evil, firewall=evil, rdma=evil, unread=[evil] * 99,
        rdma_devices=[evil], versions={evil: evil, "brigade": evil}, code=evil,
        interfaces=99 * [Interface(name=evil, addresses=[MINI])],
    )  # fmt: skip
    lines = [Line(error=evil), Line(transport=TRANSPORT_TCP, rtt_ms=float("nan"), bytes_per_s=float("inf"))] * 50
    reply = LinkReply(rtt_ms=1.0, bytes_per_s=1.0, way=Way(address=evil, local=STUDIO, remote=evil), lines=lines)
    lost = ExaminedHop("studio", "mini", LinkReply(way=Way(error=evil, address=evil)))
    back = ExaminedHop("mini", "studio", LinkReply(way=Way(local=MINI, remote=STUDIO)))
    found = known(
        ExaminedNode("mini", facts, clock_offset_s=1e300), hops=[ExaminedHop("studio", "mini", reply), lost, back]
    )
    silent = known(ExaminedNode("mini", error=StageLost(evil), ways=[Way(error=evil, address=evil)]))
    findings = [*judged(found), *judged(silent)]
    assert any("\N{REPLACEMENT CHARACTER}" in each.text for each in findings)
    for each in (found, silent):
        examination = Examination(each, ModelInUse(model()), "big", findings)
        told = json.dumps(examination.as_json(), allow_nan=False, ensure_ascii=False)
        assert told.isprintable() and "\\u" not in told and len(told) < 100_000
    for each in findings:
        assert each.text.isprintable() and each.fix.isprintable() and each.about.isprintable() and len(each.text) < 500


def test_a_coordinator_that_is_not_trusted_is_told_how_to_get_a_certificate() -> None:
    for expires, fix in ((0, "give cluster.yaml here the `tls:`"), (1, "brigade keys issue studio --coordinator")):
        studio = node("studio", STUDIO, certificate_expires=expires)
        closed = ExaminedNode(
            "mini", error=StageLost(CLOSED_AT_ONCE), ways=[Way(address="a:1")], start="brigade worker"
        )
        found = said(judged(known(closed, studio=studio)), Kind.UNREACHABLE)
        assert found.text == CLOSED_AT_ONCE and fix in found.fix and "brigade worker" not in found.fix
    for told, fix in (("; chmod 600 it", "chmod 600 it"), ("", Role.COORDINATOR.issue_hint("studio"))):
        error = ConfigError(f"keys/studio.pem cannot be read{told}")
        findings = judged(ExaminedCluster([replace(node("studio", STUDIO), error=error)]))
        found = [(each.text, each.fix) for each in findings if each.level is PROBLEM]
        assert found == [("keys/studio.pem cannot be read", fix)], "the fix stands once"
