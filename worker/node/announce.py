"""Announcements by DNS-SD: a node announces itself on the interfaces that it listens on.

An announcement is a hint and gives no trust. `About.of_txt` checks announcements that come from the network.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from logging import Logger

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from worker.config import is_node_name, split_address
from worker.errors import BrigadeError, ConfigError
from worker.node.log import log_failure
from worker.node.network import Network
from worker.platform.installation import version_of
from worker.platform.interfaces import keep_to, listened_on, own_interfaces
from worker.platform.tasks import background
from worker.platform.threads import run_in_thread

SERVICE = "_brigade._tcp.local."
MAX_NAME = 128  # characters; a TXT record's string has 255
_VERSION = r"[0-9A-Za-z.+!_-]{1,64}"
_FINGERPRINT = r"[0-9a-f]{64}|"
_PROCESS = r"[0-9a-f]{8}"
_KEYS = ("name", "version", "process", "fingerprint")

LOOK_EVERY_S = 5.0  # for new interfaces and renewed certificates
_GOODBYE_S = 0.05  # the first of three goodbyes is sent at once; the others are not worth waiting for

_THIS_PROCESS = secrets.token_hex(4)


@dataclass(frozen=True)
class About:
    """The contents of a node's announcement."""

    name: str
    version: str  # of brigade
    process: str  # random; it joins the announcements that a node makes on each interface
    fingerprint: str = ""  # SHA-256 of the certificate in hex; empty if links are not encrypted

    @property
    def invalid_field(self) -> str | None:
        """The first field with an unexpected format; None if all are fine. Terminals and files get these texts."""
        is_sound = {
            "name": len(self.name) <= MAX_NAME and is_node_name(self.name),
            "version": re.fullmatch(_VERSION, self.version),
            "process": re.fullmatch(_PROCESS, self.process),
            "fingerprint": re.fullmatch(_FINGERPRINT, self.fingerprint),
        }
        return next((key for key in _KEYS if not is_sound[key]), None)

    def to_txt(self) -> dict[str, str]:
        """Return the properties of a TXT record."""
        return {key: value for key in _KEYS if (value := getattr(self, key)) or key != "fingerprint"}

    @classmethod
    def of_txt(cls, properties: Mapping[bytes, bytes | None]) -> "About | None":
        """Read a TXT record from the network; None unless every field has the expected format."""
        try:
            found = cls(**{key: (properties.get(key.encode()) or b"").decode("ascii") for key in _KEYS})
        except UnicodeDecodeError:
            return None
        return None if found.invalid_field else found


@dataclass(frozen=True)
class AnnouncedPlace:
    """The addresses and port at which a node listens on one interface."""

    interface: str
    addresses: tuple[str, ...]
    port: int


def about(name: str, network: Network) -> About:
    """Return this node's announcement. Raises ConfigError for an unusable certificate or name."""
    own = network.own
    fingerprint = x509.load_pem_x509_certificate(own.certificate).fingerprint(SHA256()).hex() if own else ""
    found = About(name, version_of("brigade").replace(" ", "-"), _THIS_PROCESS, fingerprint)
    if (invalid := found.invalid_field) == "name":
        raise ConfigError(f"expected a name of at most {MAX_NAME} letters, digits, '-', '_' and '.', found {name!r}")
    if invalid:
        raise ConfigError(f"expected a {invalid} that can be announced, found {getattr(found, invalid)!r}")
    return found


@contextlib.asynccontextmanager
async def announcing(say: Callable[[], About], listens_on: Sequence[str], log: Logger) -> AsyncIterator[None]:
    """Announce this node until the context ends. A failure is only logged.

    Args:
        say: returns the announcement; it is called repeatedly.
        listens_on: HOST:PORT of the node's servers; may grow.
    """
    async with background(_keep_announced(say, listens_on, log), partial(log_failure, log)):
        yield


async def _keep_announced(say: Callable[[], About], listens_on: Sequence[str], log: Logger) -> None:
    """Announce, and start over whenever the announcement, addresses or interfaces change. Never return."""
    await run_in_thread(partial(import_module, "zeroconf.asyncio"))  # a slow import
    from zeroconf import Error

    last_failure = ""
    while True:
        try:
            now = say(), await places_of(listens_on)
            async with announced(*now):
                last_failure = ""
                while (say(), await places_of(listens_on)) == now:  # noqa: ASYNC110 - nothing signals these changes
                    await asyncio.sleep(LOOK_EVERY_S)
        except (OSError, RuntimeError, ValueError, Error, BrigadeError) as error:
            if (failure := str(error) or type(error).__name__) != last_failure:
                log.warning("cannot announce itself (%s); give its address in cluster.yaml. It still serves", failure)
            last_failure = failure
            await asyncio.sleep(LOOK_EVERY_S)


async def places_of(listens_on: Iterable[str]) -> list[AnnouncedPlace]:
    """Return where a node that listens on these HOST:PORT can be reached."""
    interfaces = own_interfaces()
    found = []
    for address in listens_on:
        host, port = split_address(address)
        for *_, place in await asyncio.get_running_loop().getaddrinfo(host, None):
            found += [
                AnnouncedPlace(each.name, each.addresses, port) for each in listened_on(str(place[0]), interfaces)
            ]
    return list(dict.fromkeys(found))


@contextlib.asynccontextmanager
async def announced(about: About, places: Iterable[AnnouncedPlace]) -> AsyncIterator[None]:
    """Announce each place on its own interface only. Raises any failure."""
    async with contextlib.AsyncExitStack() as stack:
        for place in places:
            await stack.enter_async_context(_announced_at(about, place))
        yield


@contextlib.asynccontextmanager
async def _announced_at(about: About, place: AnnouncedPlace) -> AsyncIterator[None]:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf  # not imported by local workers

    label = about.name.replace(".", "-")[:40]
    instance = f"{label}-{about.process}-{secrets.token_hex(2)}"  # unique, so it need not be probed for first
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
        await (await sender.async_register_service(service, cooperating_responders=True))
        try:
            yield
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await sender.async_unregister_all_services()
