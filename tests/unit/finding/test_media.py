"""Kinds of links. What systems print of them is claimed where that is read."""

from coordinator.finding.media import Medium, media_now
from protos.brigade_pb2 import MEDIUM_LOOPBACK, MEDIUM_THUNDERBOLT, MEDIUM_UNSPECIFIED
from protos.brigade_pb2 import Medium as Number


def test_a_cable_comes_before_ethernet_that_before_wifi_and_a_tunnel_last_of_what_is_known() -> None:
    assert sorted(Medium, key=lambda medium: medium.rank) == [
        Medium.LOOPBACK,
        Medium.THUNDERBOLT,
        Medium.ETHERNET,
        Medium.WIFI,
        Medium.TUNNEL,
        Medium.UNSPECIFIED,
    ]


def test_every_kind_that_nodes_tell_of_has_a_name_for_people() -> None:
    assert {Medium.of(number) for number in Number.values()} == set(Medium)
    assert Medium.of(MEDIUM_THUNDERBOLT).said == "Thunderbolt" and Medium.of(MEDIUM_LOOPBACK).said == "this machine"
    assert Medium.of(MEDIUM_UNSPECIFIED).said == "another link"


def test_this_machine_has_loopback() -> None:
    assert Medium.LOOPBACK in media_now().values()
