"""Announcing: a node says by DNS-SD that it is there, on the interfaces that it listens on and no others."""

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from worker.config import split_address
from worker.errors import BrigadeError, ConfigError
from worker.node.announcement import LONGEST_NAME, SERVICE, About
from worker.node.log import Log
from worker.node.network import Network
from worker.process.beside import beside
from worker.process.call_thread import run_aside
from worker.process.interfaces import keep_to, listened_on, own_interfaces
from worker.process.own_code import version_of

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

_LOOK_EVERY_S = 5.0  # for a cable that was plugged in, and a certificate that was renewed
_GOODBYE_S = 0.05  # the first of three goodbyes is sent at once; nobody waits for the others

_PROCESS = secrets.token_hex(4)


@dataclass(frozen=True)
class Place:
    """Where a node listens on one interface."""

    interface: str
    addresses: tuple[str, ...]
    port: int


def about(name: str, network: Network) -> About:
    """What this node may say of itself now. Raises ConfigError for a certificate or a name that will not do."""
    own = network.own
    shown = x509.load_pem_x509_certificate(own.certificate).fingerprint(SHA256()).hex() if own else ""
    said = About(name, version_of("brigade").replace(" ", "-"), _PROCESS, shown)
    if said.unsound == "name":
        raise ConfigError(
            f"expected a name of at most {LONGEST_NAME} letters, digits, '-', '_' and '.', found {name!r}"
        )
    if said.unsound:
        raise ConfigError(f"expected a {said.unsound} that can be announced, found {getattr(said, said.unsound)!r}")
    return said


@contextlib.asynccontextmanager
async def announcing(say: Callable[[], About], listens_on: Sequence[str], log: Log) -> AsyncIterator[None]:
    """Announce this node for as long as the context lives. That it cannot be is a line of the log, and no failure.

    Args:
        say: what it says of itself; asked again and again.
        listens_on: where it listens, HOST:PORT; may get more entries.
    """
    async with beside(_keep_announced(say, listens_on, log), log.say_failed):
        yield


async def _keep_announced(say: Callable[[], About], listens_on: Sequence[str], log: Log) -> None:
    """Never return: whatever cannot be announced now may be later."""
    await run_aside(partial(import_module, "zeroconf.asyncio"))  # which holds up nobody so
    from zeroconf import Error

    told = ""
    while True:
        try:
            said = say(), await places_of(listens_on)
            async with announced(*said):
                told = ""
                await _wait_changed(say, listens_on, *said)
        except (OSError, RuntimeError, ValueError, Error, BrigadeError) as error:
            if (why := str(error) or type(error).__name__) != told:
                log.not_announced(why)
            told = why
            await asyncio.sleep(_LOOK_EVERY_S)


async def _wait_changed(say: Callable[[], About], listens_on: Sequence[str], about: About, places: list[Place]) -> None:
    """Nothing tells of a cable that is plugged in, or of a certificate that is renewed."""
    while (say(), await places_of(listens_on)) == (about, places):  # noqa: ASYNC110 - so it is looked for
        await asyncio.sleep(_LOOK_EVERY_S)


async def places_of(listens_on: Iterable[str]) -> list[Place]:
    """Where a node that listens on these, HOST:PORT, can be reached, by its own interfaces."""
    interfaces = own_interfaces()
    found = []
    for address in listens_on:
        host, port = split_address(address)
        for ip in await _ips_of(host):
            found += [Place(each.name, each.addresses, port) for each in listened_on(ip, interfaces)]
    return list(dict.fromkeys(found))


@contextlib.asynccontextmanager
async def announced(about: About, places: Iterable[Place]) -> AsyncIterator[None]:
    """Announce these places, each on its interface only. Raises what goes wrong."""
    async with contextlib.AsyncExitStack() as stack:
        for place in places:
            await stack.enter_async_context(_announced_at(about, place))
        yield


@contextlib.asynccontextmanager
async def _announced_at(about: About, place: Place) -> AsyncIterator[None]:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf  # which local workers never need

    instance = f"{_label(about.name)}-{about.process}-{secrets.token_hex(2)}"  # nobody else's, so none has to be asked
    service = AsyncServiceInfo(
        SERVICE,
        f"{instance}.{SERVICE}",
        port=place.port,
        parsed_addresses=list(place.addresses),
        properties=about.to_txt(),
        server=f"brigade-{instance}.local.",
    )
    async with contextlib.AsyncExitStack() as stack:
        sender = AsyncZeroconf(interfaces=list(place.addresses))
        stack.push_async_callback(sender.async_close)
        await sender.zeroconf.async_wait_for_start()
        for reader in sender.zeroconf.engine.readers:
            keep_to(reader.transport.get_extra_info("socket"), place.interface)
        stack.push_async_callback(_say_goodbye, sender)
        await (await sender.async_register_service(service, cooperating_responders=True))
        yield


async def _say_goodbye(sender: "AsyncZeroconf") -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GOODBYE_S):
            await sender.async_unregister_all_services()


async def _ips_of(host: str) -> list[str]:
    """Those of a name; an address is its own."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    found = await asyncio.get_running_loop().getaddrinfo(host, None)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def _label(name: str) -> str:
    """What a DNS label can hold of a name."""
    return name.replace(".", "-")[:40]
