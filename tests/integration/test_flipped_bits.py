"""Flipped bits on a hop, encrypted or not: whatever bit it is, the frame is not taken, and the hop ends."""

import random
from pathlib import Path

import pytest

from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK
from tests.integration.many import until
from tools.flipped_bits import frame_of, recording, send_encrypted, send_plaintext
from tools.proxy import Proxy
from worker.node.hop import Link
from worker.node.network import Network


@pytest.mark.parametrize("count", [200, pytest.param(400, marks=pytest.mark.matrix)])
async def test_of_hundreds_of_encrypted_frames_with_a_flipped_bit_none_is_accepted(tmp_path: Path, count: int) -> None:
    certificates = Certificates(tmp_path)
    assert await send_encrypted(certificates.coordinator(), certificates.network("node-1"), count) == (count, 0)


async def test_of_hundreds_of_plain_frames_with_a_flipped_bit_none_is_accepted() -> None:
    assert await send_plaintext(NETWORK, 200) == (200, 0)


async def test_a_frame_of_which_no_bit_is_flipped_is_accepted(tmp_path: Path) -> None:
    certificates, payload = Certificates(tmp_path), random.Random(3).randbytes(16_000_000)
    await assert_accepted(certificates.coordinator(), certificates.network("node-1"), payload)
    await assert_accepted(NETWORK, NETWORK, payload)


async def assert_accepted(sender: Network, receiver: Network, payload: bytes) -> None:
    async with recording(receiver) as (recorder, address), Proxy(address).serving() as proxy:
        link = Link(sender, "node-1", proxy.address, 1, 0)
        await link.send(frame_of(200, payload, sender.wire))
        await until(lambda: bool(recorder.arrived))
        await link.close()
    [arrival] = recorder.arrived
    assert b"".join(arrival.payload) == payload and len(arrival.payload) == 2
