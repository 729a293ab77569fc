"""What tools of macOS print, as others have recorded it, and what it says. Nothing here was run on a Mac."""

import ctypes
import json
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    Facts,
    Medium,
)
from tests.unit.fuzz import fuzzed, nearly
from worker.platform import threads
from worker.platform.mac import (
    READINGS,
    parse_firewall,
    parse_hardware_ports,
    parse_interfaces,
    parse_settings,
    parse_thunderbolt,
    parse_wired_limit,
    read_power,
    read_rdma,
)

# A Mac Studio with a MacBook in one port and a drive in another: github.com/jundot/omlx, tests of cluster/topology
THUNDERBOLT = """
{ "SPThunderboltDataType" : [
    { "_name" : "thunderboltusb4_bus_5", "device_name_key" : "Mac Studio", "domain_uuid_key" : "1CF1083E",
      "receptacle_1_tag" : { "current_speed_key" : "Up to 120 Gb/s", "link_status_key" : "0x100",
        "receptacle_id_key" : "6", "receptacle_status_key" : "receptacle_no_devices_connected" },
      "route_string_key" : "0", "vendor_name_key" : "Apple Inc." },
    { "_items" : [
        { "_name" : "Envoy Ultra", "device_name_key" : "Envoy Ultra", "mode_key" : "usb_four_v2",
          "receptacle_upstream_ambiguous_tag" : { "current_speed_key" : "80 Gb/s" },
          "vendor_name_key" : "Other World Computing" } ],
      "_name" : "thunderboltusb4_bus_3", "domain_uuid_key" : "5F771049",
      "receptacle_1_tag" : { "current_speed_key" : "80 Gb/s", "receptacle_id_key" : "4",
        "receptacle_status_key" : "receptacle_connected" } },
    { "_items" : [
        { "_name" : "MacBook Pro", "device_name_key" : "Mac17,7", "domain_uuid_key" : "817DCFA4",
          "services_title" : [ { "_name" : "service_ip", "protocol_id_key" : 1 } ],
          "vendor_name_key" : "Apple Inc." } ],
      "_name" : "thunderboltusb4_bus_1", "domain_uuid_key" : "28CA4C30",
      "receptacle_1_tag" : { "current_speed_key" : "40 Gb/s", "receptacle_id_key" : "2",
        "receptacle_status_key" : "receptacle_connected" } } ] }
"""
HARDWARE_PORTS = """
Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 6a:5b:0c:11:22:33

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:63:02:90:b7:40

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 5c:e9:1e:b2:06:1f

Hardware Port: Thunderbolt 1
Device: en1
Ethernet Address: 36:63:02:90:b7:40

Hardware Port: USB 10/100/1000 LAN
Device: en7
Ethernet Address: 00:e0:4c:68:01:02

VLAN Configurations
===================
"""
IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
\tnd6 options=201<PERFORMNUD,DAD>
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
en7: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmedia: autoselect (1000baseT <full-duplex>)
\tstatus: inactive
en1: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tether 36:63:02:90:b7:40
\tstatus: inactive
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet6 fe80::892:c40d:ee29:fc0a%en0 prefixlen 64 secured scopeid 0xe
\tinet 192.168.110.127 netmask 0xffffff00 broadcast 192.168.110.255
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 9000
\tinet 169.254.10.2 netmask 0xffff0000 broadcast 169.254.255.255
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en1 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 10 priority 0 path cost 0
\tstatus: active
awdl0: flags=8843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet6 fe80::141f:b7ff:fe3b:6ca2%awdl0 prefixlen 64 scopeid 0x10
\tstatus: active
utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
\tinet 10.5.0.2 --> 10.5.0.2 netmask 0xffff0000
"""
PMSET = """\
System-wide power settings:
 SleepDisabled\t\t0
Currently in use:
 Sleep On Power Button 1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd, caffeinate)
 ttyskeepawake        1
 displaysleep         10
 lowpowermode         0
"""
IBV_DEVICES = """\
    device          \t   node GUID
    ------          \t----------------
    rdma_en2        \te0c5797d9c8fac05
    rdma_en3        \te1c5797d9c8fac05
"""  # TN3205
ON, OFF = "Firewall is enabled. (State = 1)\n", "Firewall is disabled. (State = 0)\n"
ALL, SOME = (f"Firewall has block all state set to {state}.\n" for state in ("enabled", "disabled"))


def test_thunderbolt_ports_with_their_speed_and_the_computers_at_them() -> None:
    assert [
        (port.name, port.id, port.gbit, port.is_connected, port.peer, port.peer_id)
        for port in parse_thunderbolt(THUNDERBOLT)
    ] == [
        ("2", "28CA4C30", 40.0, True, "MacBook Pro", "817DCFA4"),
        ("4", "5F771049", 80.0, True, "", ""),  # a drive
        ("6", "1CF1083E", 120.0, False, "", ""),
    ]
    for text in ("", "{}", "not json", '{"SPThunderboltDataType": 3}', '{"SPThunderboltDataType": [{"_name": "bus"}]}'):
        assert parse_thunderbolt(text) == []


def test_interfaces_that_are_up_with_what_they_are_and_their_addresses() -> None:
    found = {each.name: each for each in parse_interfaces(IFCONFIG, parse_hardware_ports(HARDWARE_PORTS))}
    assert {name: each.medium for name, each in found.items()} == {
        "lo0": MEDIUM_LOOPBACK,
        "en7": MEDIUM_ETHERNET,
        "en1": MEDIUM_THUNDERBOLT,
        "en0": MEDIUM_WIFI,
        "bridge0": MEDIUM_THUNDERBOLT,
        "awdl0": MEDIUM_UNSPECIFIED,
        "utun4": MEDIUM_TUNNEL,
    }
    bridge = found["bridge0"]
    assert (bridge.port, bridge.mtu, bridge.is_active) == ("Thunderbolt Bridge", 9000, True)
    assert list(bridge.addresses) == ["169.254.10.2"]
    assert list(found["lo0"].addresses) == ["127.0.0.1", "::1", "fe80::1"] and found["lo0"].is_active
    assert not found["en7"].is_active
    assert parse_interfaces("", {}) == [] and parse_hardware_ports("nothing") == {}


@pytest.mark.parametrize(
    ("name", "port", "medium"),
    [
        *(
            ("en9", port, MEDIUM_ETHERNET)
            for port in ("Thunderbolt Ethernet", "Thunderbolt Ethernet Slot 1", "AX88179A LAN")
        ),
        ("en9", "WLAN", MEDIUM_WIFI),  # in German
        ("bridge0", "Pont Thunderbolt", MEDIUM_THUNDERBOLT),
        ("bridge0", "", MEDIUM_THUNDERBOLT),
        ("bridge100", "", MEDIUM_UNSPECIFIED),  # of a virtual machine, or of Internet Sharing
    ],
)
def test_an_adapter_is_what_its_name_says_whatever_it_is_plugged_into(name: str, port: str, medium: Medium) -> None:
    [found] = parse_interfaces(f"{name}: flags=8863<UP,RUNNING> mtu 1500\n", {name: port})
    assert found.medium == medium


def test_a_mac_behind_a_dock_is_found() -> None:
    report = json.loads(THUNDERBOLT)
    [*_, bus] = report["SPThunderboltDataType"]
    bus["_items"] = [{"_name": "Dock", "_items": [{"_name": "Hub", "_items": bus["_items"]}]}]
    assert parse_thunderbolt(json.dumps(report)) == parse_thunderbolt(THUNDERBOLT)


def test_when_it_falls_asleep_is_not_mistaken_for_other_settings() -> None:
    power = parse_settings(PMSET)
    assert (power.sleep_minutes, power.is_kept_awake, power.is_saving) == (1, True, False)
    without = parse_settings(PMSET.replace(", caffeinate", "").replace("lowpowermode         0", "lowpowermode 1"))
    assert (without.sleep_minutes, without.is_kept_awake, without.is_saving) == (1, False, True)
    for mode, is_saving in (("0", False), ("1", True), ("2", False)):  # of a MacBook Pro that also has a high one
        assert parse_settings(PMSET.replace("lowpowermode         0", f"powermode {mode}")).is_saving == is_saving
    assert parse_settings(PMSET.replace("SleepDisabled\t\t0", "SleepDisabled\t\t1")).sleep_minutes == 0
    assert not parse_settings("").HasField("sleep_minutes")


def test_battery_and_app_nap() -> None:
    batt, nap = "pmset -g batt", "defaults read NSGlobalDomain NSAppSleepDisabled"
    for prints, is_on_battery, may_nap in (
        ({batt: "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=4653155)\t62%; discharging\n"}, True, True),
        ({batt: "Now drawing from 'AC Power'\n", nap: "1\n"}, False, False),
    ):
        power = read_power(lambda *command, prints=prints: prints.get(" ".join(command), ""))
        assert (power.is_on_battery, power.may_nap) == (is_on_battery, may_nap)


@pytest.mark.parametrize(
    ("state", "block_all", "program", "said"),
    [
        (OFF, SOME, "", "off"),
        (ON, SOME, "The application is not part of the firewall", "on"),
        (ON, SOME, "Incoming connection to the application is permitted", "on"),
        (ON, SOME, "Incoming connection to the application is blocked", "blocks this program"),
        (ON, ALL, "", "blocks all"),
        ("Firewall is enabled. (State = 2)", SOME, "", "blocks all"),
        ("", "", "", ""),
        ("Application firewall needs root", "", "", ""),
    ],
)
def test_the_firewall(state: str, block_all: str, program: str, said: str) -> None:
    assert parse_firewall(state, block_all, program) == said


def test_rdma_is_asked_for_devices_only_where_it_is_enabled() -> None:
    enabled = {"rdma_ctl status": "enabled\n", "ibv_devices": IBV_DEVICES}
    devices = ["rdma_en2", "rdma_en3"]
    assert read_rdma(lambda *command: enabled[" ".join(command)]) == Facts(rdma="enabled", rdma_devices=devices)
    disabled = {"rdma_ctl status": "disabled\n"}
    assert read_rdma(lambda *command: disabled[" ".join(command)]) == Facts(rdma="disabled")
    assert read_rdma(lambda *command: "") == read_rdma(lambda *command: "usage: rdma_ctl") == Facts()
    enabled["ibv_devices"] = ""
    assert read_rdma(lambda *command: enabled[" ".join(command)]) == Facts(rdma="enabled")


def test_the_wired_limit() -> None:
    for text, limit in (("0\n", 0), ("57344\n", 57344), ("", None), ("unknown oid", None), ("²", None)):
        assert parse_wired_limit(text) == limit


def test_a_mac_that_tells_nothing_has_no_facts_but_harmless_ones() -> None:
    for reading in READINGS:
        found = reading(lambda *command: "")
        assert not found.interfaces and not found.thunderbolt and not found.firewall and not found.rdma


PRINTED = [each.encode() for each in (THUNDERBOLT, IFCONFIG, HARDWARE_PORTS, PMSET, IBV_DEVICES, ON, "57344")]


@given(printed=st.sampled_from(PRINTED).flatmap(nearly))
@fuzzed(40)
def test_fuzz_nothing_that_a_tool_prints_makes_a_parser_fail(printed: bytes) -> None:
    text = printed.decode(errors="replace")
    for reading in READINGS:
        reading(lambda *command: text)


def test_the_mlx_thread_asks_for_the_highest_service_class_and_only_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, str]] = []

    def ask(service_class: int, relative_priority: int) -> None:
        asked.append((service_class, relative_priority, threading.current_thread().name))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(pthread_set_qos_class_self_np=ask))
    raise_service_class = threads.raise_service_class

    def on_macos() -> None:
        raise_service_class()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            raise_service_class()

    monkeypatch.setattr(threads, "raise_service_class", on_macos)
    threads.MlxThread().close()
    assert asked == [(0x21, 0, "mlx")]
