"""The addresses of one worker: all are asked at once, and that of its newest process is used."""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence

import grpc.aio

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeStub
from worker.config import split_address
from worker.errors import CallerRefused, ConfigError, StageLost, Unanswered
from worker.node.certificates import Role
from worker.node.network import PROTOCOL_VERSION, Network, has_succeeded, wait_head_start
from worker.node.rpc_errors import closed_before_reply, error_of, is_unconnected, unresolved_name
from worker.platform.tasks import cancel_all

_REQUEST = HelloRequest(protocol_version=PROTOCOL_VERSION)
_HANDSHAKE_S = 2.0


class _Silence(StageLost):
    """Nothing answers at an address."""


class _NameUnknown(_Silence):
    """The host's name of an address has no IP address, as far as this machine knows."""


class AddressRace:
    """A channel to the address in use; channels to the others last as long as a question."""

    def __init__(self, name: str, addresses: Sequence[str], network: Network, say: Callable[[str], None]) -> None:
        """`addresses` are in the order of preference; `say` takes lines for the user."""
        self.name = name
        self.addresses = tuple(addresses)
        self._network = network
        self._say = say
        self._told: set[str] = set()  # incarnations of older processes that the user knows of
        self._of_others: set[str] = set()  # addresses where an older process answered
        self._use(self.addresses[0], self._network.channel(name, self.addresses[0]))
        self._shown = network.own

    @property
    def leading_to_it(self) -> list[str]:
        """The addresses at which other nodes can reach the same process."""
        return [address for address in self.addresses if address not in self._of_others]

    async def ask(self, within_s: float, *, waits: bool = True) -> HelloReply:
        """Ask at every address, use the best one that answers from then on, and return its answer.

        `waits` for a worker that does not listen yet.

        Raises:
            BrigadeError: what is wrong with the first worker that is there, or with this node's certificate.
            CallerRefused: a worker is there and refuses this node. StageLost: nothing answers.
        """
        await self._renew()
        channels = {  # new ones to those not in use: the backoff of earlier failures does not delay them
            address: self._channel if address == self.address else self._network.channel(self.name, address)
            for address in self.addresses
        }
        asking = {a: asyncio.create_task(self._ask_at(a, each, within_s, waits=waits)) for a, each in channels.items()}
        try:
            await wait_head_start(asking.values(), within_s)
            replies = {address: task.result() for address, task in asking.items() if has_succeeded(task)}
            if not replies:
                raise self._failure([task.exception() for task in asking.values()])
            address, older = newest(self.name, replies)
            self._note(address, older, replies)
            self._use(address, channels[address])
            return replies[address]
        finally:
            await cancel_all(*asking.values())
            await asyncio.gather(*(each.close(grace=None) for each in channels.values() if each is not self._channel))

    async def ask_in_use(self, within_s: float) -> HelloReply:
        """Ask only the process in use, which is part of a chain. Raises the same errors."""
        try:
            return await self._ask_at(self.address, self._channel, within_s, waits=True)
        except _Silence as silence:
            raise self._failure([silence]) from None

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _use(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._channel = channel
        self.stub = NodeStub(channel)

    async def _renew(self) -> None:
        """Use this node's present certificate from now on. Raises ConfigError if it is not valid."""
        if self._network.own is not self._shown:
            await self._channel.close(grace=None)
            self._use(self.address, self._network.channel(self.name, self.address))
            self._shown = self._network.own

    async def _ask_at(self, address: str, channel: grpc.aio.Channel, within_s: float, *, waits: bool) -> HelloReply:
        """Ask without waiting, since gRPC gives no reason while it waits, and then again until the time is over."""
        hello = NodeStub(channel).Hello
        refusal, until = None, time.monotonic() + within_s
        for is_patient in (False, True) if waits else (False,):
            try:
                left_s = max(0.0, until - time.monotonic())
                return await hello(_REQUEST, timeout=left_s, wait_for_ready=is_patient)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    break
                if name := unresolved_name(error):
                    raise _NameUnknown(name) from error
                found = error_of(error, self.name, launch=self._network.launch_hint(self.name))
                if is_patient or isinstance(found, ConfigError) or not is_unconnected(error):
                    raise found from error
                if closed_before_reply(error):
                    refusal = found
                    if reason := await self._refusal_at(address):
                        raise CallerRefused(reason, node=self.name) from error
        raise refusal or _Silence("nothing answers")

    async def _refusal_at(self, address: str) -> str:
        """Return why the process at an address closed the connection, and what to do; empty if a handshake cannot tell.

        gRPC does not report it: a server that refuses a certificate closes the connection after the handshake.
        """
        host, port = split_address(address)
        try:
            own = self._network.own
            context = self._network.tls_context(server=False) if own else ssl.create_default_context()
            if own is None:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            async with asyncio.timeout(_HANDSHAKE_S):
                name = self.name if own else ""
                reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
                try:
                    is_closed = not await reader.read(1)
                finally:
                    writer.close()
        except ssl.SSLError as error:
            is_closed = "ALERT" in (error.reason or "")
            if not is_closed:
                return ""  # it does not speak TLS
        except (OSError, TimeoutError, ConfigError):  # ConfigError: this node's own certificate is not valid any more
            return ""
        if own is None:
            return f"it expects TLS, and {self._network.file} here has no `tls:`; set it, with the keys of its cluster"
        issue = Role.COORDINATOR.issue_hint(own.name)
        return f"it refuses this node's certificate, as of another authority or time; {issue}" if is_closed else ""

    def _failure(self, errors: Sequence[BaseException | None]) -> BaseException:
        """Return the error to raise if every address failed: the first one that says more than silence."""
        if found := next((error for error in errors if error and not isinstance(error, _Silence)), None):
            return found
        unknown = [error.message for error in errors if isinstance(error, _NameUnknown)]
        if len(unknown) == len(errors):
            fix = f"check its `address:` in {self._network.file}, or give its IP address there"
            return StageLost(f"the name {unknown[0]} does not resolve on this machine: {fix}", node=self.name)
        silence = f"nothing answers at {' or '.join(self.addresses)}"
        return Unanswered(silence, node=self.name, start=self._network.start_hint(self.name))

    def _note(self, address: str, older: Sequence[str], replies: Mapping[str, HelloReply]) -> None:
        """Remember the addresses of other processes of this name, and tell the user once of each."""
        self._of_others = {each for each, reply in replies.items() if reply.incarnation != replies[address].incarnation}
        for each in older:
            if (incarnation := replies[each].incarnation) not in self._told:
                self._told.add(incarnation)
                self._say(
                    f"worker {self.name}: two processes have this name; the one at {address}, which was started later, "
                    f"takes part: end the one at {each}"
                )


def newest(name: str, replies: Mapping[str, HelloReply]) -> tuple[str, list[str]]:
    """Choose the process to use: the one started last of those that call themselves `name`, or of all if none does.

    Args:
        replies: by address, in the order of preference.
    Returns:
        The first address of that process, and the addresses of other processes that call themselves `name`.
    """
    meant = max(replies.values(), key=lambda reply: (reply.node == name, reply.started))
    address = next(each for each, reply in replies.items() if reply.incarnation == meant.incarnation)
    others = (each for each, reply in replies.items() if reply.incarnation != meant.incarnation)
    return address, [each for each in others if replies[each].node == name]
