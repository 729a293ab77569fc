import os
import resource

import pytest

from worker.platform.machine import allow_connections, budget_from, is_overloaded

GIB = 2**30

MACBOOK_AIR_8 = {
    "resource_limit": 499000, "max_buffer_length": 4294967296, "architecture": "applegpu_g13g",
    "memory_size": 8589934592, "max_recommended_working_set_size": 5726623061, "device_name": "Apple M1",
}  # fmt: skip
MAC_MINI_16 = MACBOOK_AIR_8 | {"memory_size": 17179869184, "max_recommended_working_set_size": 11453251584}
STUDIO_192 = MACBOOK_AIR_8 | {"memory_size": 206158430208, "max_recommended_working_set_size": 154618822656}
NVIDIA = {"device_name": "NVIDIA H200", "architecture": "sm_90"}
CPU = {"device_name": "x86_64", "architecture": "x86_64"}


@pytest.mark.parametrize(
    ("device", "available", "counts"),
    [
        (MACBOOK_AIR_8, 7 * GIB, 5726623061),  # Metal may wire down less than what is free
        (MACBOOK_AIR_8, 3 * GIB, 5726623061),  # what the system caches makes way for what Metal wires
        (MAC_MINI_16, 11453251584, 11453251584),
        (STUDIO_192, 180 * GIB, 154618822656),
        (MAC_MINI_16, 0, 11453251584),
        (NVIDIA, 64 * GIB, 64 * GIB),
        (NVIDIA, 0, 0),
        (CPU, 32 * GIB, 32 * GIB),
        ({}, 32 * GIB, 32 * GIB),
        ({"max_recommended_working_set_size": str(4 * GIB)}, 8 * GIB, 4 * GIB),
    ],
)
def test_a_node_offers_nine_tenths_of_its_memory(device: dict[str, str | int], available: int, counts: int) -> None:
    assert budget_from(device, available) == int(0.9 * counts)


NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((256, NONE), (2000, NONE)),  # macOS
        ((1024, 4096), (2000, 4096)),
        ((1024, 1500), (1500, 1500)),
        ((3000, 4096), (3000, 4096)),
        ((NONE, NONE), (NONE, NONE)),
    ],
)
def test_as_many_connections_are_allowed_as_the_system_lets_one_ask_for(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, pair: limits.append(pair))
    allow_connections(1000)
    assert limits[-1] == after


@pytest.mark.parametrize(("load", "expected"), [(0.3, False), (8.0, False), (8.5, True)])
def test_a_machine_is_overloaded_if_more_threads_than_cpus_wait(
    monkeypatch: pytest.MonkeyPatch, load: float, expected: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 99.0))
    assert is_overloaded() == expected
