"""Who of those that announce themselves can be in one cluster, and by which addresses."""

import pytest

from coordinator.finding.draft import Draft, draft, within_reach
from coordinator.finding.media import Medium
from coordinator.finding.present import Present
from coordinator.finding.ways import Way

CABLE = Way("169.254.10.2:1", "bridge0", Medium.THUNDERBOLT)
WIFI = Way("192.168.1.7:1", "en0", Medium.WIFI)
LAN = Way("10.0.0.7:1", "en7", Medium.ETHERNET)
LOOPBACK = Way("127.0.0.1:1", "lo0", Medium.LOOPBACK)
NOWHERE = Way("172.17.0.1:1", "", Medium.UNSPECIFIED)
SHOWN = "ab" * 32


def node(name: str, *ways: Way, fingerprint: str | None = SHOWN) -> Present:
    return Present(name, "0.1.0", fingerprint, True, None, ways)


def plain(name: str, *ways: Way) -> Present:
    return node(name, *ways, fingerprint=None)


def drafted(*nodes: Present) -> Draft:
    return draft(nodes, "coordinator")


def names(found: Draft) -> list[str]:
    return [worker.name for worker in found.workers]


def test_a_worker_is_called_by_all_that_leads_there_in_order() -> None:
    [mini] = drafted(node("mini", CABLE, WIFI, NOWHERE, LOOPBACK)).workers
    assert mini.addresses == ["169.254.10.2:1", "192.168.1.7:1"]
    assert str(mini) == "mini at 169.254.10.2:1 by Thunderbolt (bridge0), else at 192.168.1.7:1 by Wi-Fi (en0)"


@pytest.mark.parametrize(
    ("nodes", "kept", "why"),
    [
        ([node("mini", CABLE), node("mini", WIFI)], [], "2 workers call themselves so"),
        ([node("mini", CABLE), node("Mini", WIFI)], [], "2 workers call themselves so"),
        ([node("Coordinator", CABLE)], [], "the coordinator has this name"),
        ([node("mi.ni.", CABLE)], [], "a certificate cannot carry this name"),
        ([node("mini", NOWHERE)], [], "no interface of this machine leads there"),
        ([node("mini", CABLE), plain("air", WIFI)], ["mini"], "it was started without a certificate"),
        (
            [node("mini", CABLE, WIFI), node("air", LAN, WIFI)],
            ["mini"],
            "mini says that it listens at 192.168.1.7:1, too",
        ),
    ],
)
def test_who_cannot_be_in_it_is_left_out_with_the_reason(nodes: list[Present], kept: list[str], why: str) -> None:
    found = drafted(*nodes)
    assert names(found) == kept
    assert found.left_out and all(" is left out: " in line for line in found.left_out)
    assert why in found.left_out[0]


def test_who_did_not_announce_itself_is_not_there() -> None:
    silent = Present("mini", None, None, False, True, [CABLE])
    assert drafted(silent) == Draft(())


def test_links_are_exposed_where_they_leave_the_machine_without_a_certificate() -> None:
    assert not drafted(node("mini", CABLE)).is_exposed
    assert not drafted(plain("mini", LOOPBACK)).is_exposed
    assert drafted(plain("mini", CABLE)).is_exposed
    assert drafted(node("mini", CABLE)).is_encrypted


def test_of_named_ones_only_they_are_taken_or_told_of() -> None:
    there = [node("mini", CABLE), node("max", LAN), plain("air", WIFI), node("coordinator", WIFI)]
    found = draft(there, "coordinator", ["mini", "air"])
    assert names(found) == ["mini"]
    assert [line.partition(" ")[0] for line in found.left_out] == ["air"]
    assert draft(there, "coordinator", []) == drafted(*there)


def test_who_is_not_wanted_keeps_nobody_out() -> None:
    there = [node("mini", CABLE), plain("air", WIFI), node("Mini", LAN)]
    assert names(draft(there, "coordinator", ["air"])) == ["air"]
    assert "2 workers call themselves so" in draft(there, "coordinator", ["mini"]).left_out[0]


def test_a_worker_on_loopback_is_left_out_beside_those_that_are_taken_only() -> None:
    whole = drafted(node("mini", CABLE), node("air", LOOPBACK))
    assert names(whole) == ["mini", "air"]
    assert within_reach(whole).left_out == (
        "air is left out: it listens on this machine's loopback, where the others cannot reach it: start it with "
        "--bind 0.0.0.0:1, or leave its layers to the coordinator",
    )
    alone = whole.without({"mini": "as you said"})
    assert within_reach(alone) == alone and names(alone) == ["air"]
