"""Proof: whether workers that announced themselves are who they say, by their certificates and their own answer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from coordinator.cluster.peer import Peer
from coordinator.finding.draft import Chosen
from worker.errors import BrigadeError
from worker.node.identity import Role, split_pem, subjects_of
from worker.node.network import Network
from worker.process.printable import printable

_WITHIN_S = 3.0
_MOST_BYTES = 1 << 16


async def unproven(workers: Sequence[Chosen], network: Network) -> dict[str, str]:
    """By name, why a worker that announced itself is not to be counted on."""
    whys = await asyncio.gather(*(_why_not(worker, network) for worker in workers))
    return {worker.name: why for worker, why in zip(workers, whys, strict=True) if why}


async def _why_not(worker: Chosen, network: Network) -> str:
    try:
        peer = Peer(worker.name, worker.addresses, network)
    except BrigadeError as error:
        return error.message
    try:
        reply = await peer.hello(_WITHIN_S)
        return "" if reply.node == worker.name else f"who answers at {peer.address} has another name"
    except BrigadeError as error:
        return printable(error.message)
    finally:
        await peer.close()


def coordinator_in(folder: Path) -> str | None:
    """The coordinator whose certificate is in this folder of keys, if there is one and no other."""
    found = [names[0] for names, roles in map(_subjects, sorted(folder.glob("*.pem"))) if roles == [Role.COORDINATOR]]
    return found[0] if len(found) == 1 else None


def _subjects(file: Path) -> tuple[list[str], list[str]]:
    try:
        with file.open("rb") as opened:
            _, certificate, _ = split_pem(opened.read(_MOST_BYTES))
        return subjects_of(x509.load_pem_x509_certificate(certificate))
    except (OSError, ValueError):
        return [], []
