"""The addresses of one worker: all are asked at once, and the one of its newest process is used."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import grpc.aio

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeStub
from worker.errors import ConfigError, StageLost, Unanswered
from worker.node.network import PROTOCOL_VERSION, Network, give_up, has_succeeded, wait_head_start
from worker.node.rpc_errors import error_of, is_unconnected, unresolved_name, was_met

_REQUEST = HelloRequest(protocol_version=PROTOCOL_VERSION)


class _Silence(StageLost):
    """Nothing answers at an address."""


class _NameUnknown(_Silence):
    """Nothing can: its host's name has no IP address, as far as this machine knows."""


class Addresses:
    """A channel to the address in use; those to the others last as long as a question."""

    def __init__(self, name: str, addresses: Sequence[str], network: Network, say: Callable[[str], None]) -> None:
        """`addresses` are in the order of preference; `say` takes lines for the user."""
        self.name = name
        self.addresses = tuple(addresses)
        self._network = network
        self._say = say
        self._told: set[str] = set()  # incarnations
        self._of_others: set[str] = set()  # addresses where an older process answered
        self._use(self.addresses[0], self._network.channel(name, self.addresses[0]))
        self._shown = network.own

    @property
    def leading_to_it(self) -> list[str]:
        """The addresses at which other nodes may find the same process."""
        return [address for address in self.addresses if address not in self._of_others]

    async def ask(self, within_s: float, *, waits: bool = True) -> HelloReply:
        """Who is there, at whichever address; from then on the best of them is in use.

        `waits` for one that does not listen yet.

        Raises:
            BrigadeError: what is wrong with the first that is there, or with this node's certificate.
            StageLost: nobody is there.
        """
        await self._renew()
        channels = {address: self._channel_to(address) for address in self.addresses}
        asking = {a: asyncio.create_task(self._ask_at(each, within_s, waits=waits)) for a, each in channels.items()}
        try:
            await wait_head_start(asking.values(), within_s)
            replies = {address: task.result() for address, task in asking.items() if has_succeeded(task)}
            if not replies:
                raise self._failure([task.exception() for task in asking.values()], within_s)
            address, older = newest(self.name, replies)
            self._note(address, older, replies)
            self._use(address, channels[address])
            return replies[address]
        finally:
            await give_up(asking.values())
            await asyncio.gather(*(each.close(grace=None) for each in channels.values() if each is not self._channel))

    async def ask_in_use(self, within_s: float) -> HelloReply:
        """The same of the process in use, which is part of a chain. Raises likewise."""
        try:
            return await self._ask_at(self._channel, within_s, waits=True)
        except _Silence as silence:
            raise self._failure([silence], within_s) from None

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _use(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._channel = channel
        self.stub = NodeStub(channel)

    def _channel_to(self, address: str) -> grpc.aio.Channel:
        """A new one to an address that is not in use: nothing of earlier failures holds it up."""
        return self._channel if address == self.address else self._network.channel(self.name, address)

    async def _renew(self) -> None:
        """Show this node's certificate as it is by now. Raises ConfigError if that will not do."""
        if self._network.own is not self._shown:
            await self._channel.close(grace=None)
            self._use(self.address, self._network.channel(self.name, self.address))
            self._shown = self._network.own

    async def _ask_at(self, channel: grpc.aio.Channel, within_s: float, *, waits: bool) -> HelloReply:
        """Ask, and wait if nobody is there yet; but first without: while gRPC waits it does not say what for."""
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
                found = error_of(error, self.name)
                if is_patient or isinstance(found, ConfigError) or not is_unconnected(error):
                    raise found from error
                refusal = found if was_met(error) else None
        raise refusal or _Silence("nothing answers")

    def _failure(self, errors: Sequence[BaseException | None], within_s: float) -> BaseException:
        """What to say if all have failed."""
        unknown = [error for error in errors if isinstance(error, _NameUnknown)]
        nobody = self._unresolved(unknown[0].message) if len(unknown) == len(errors) else self._nobody(within_s)
        return next((error for error in errors if error and not isinstance(error, _Silence)), nobody)

    def _nobody(self, within_s: float) -> StageLost:
        found = f"nothing answers at {' or '.join(self.addresses)} ({within_s:.0f} s)"
        return Unanswered(found, node=self.name, start=self._network.way_to_start(self.name))

    def _unresolved(self, host: str) -> StageLost:
        mended = f"check its `address:` in {self._network.file}, or give its IP address there"
        return StageLost(f"the name {host} does not resolve on this machine: {mended}", node=self.name)

    def _note(self, address: str, older: Sequence[str], replies: Mapping[str, HelloReply]) -> None:
        """Keep in mind where other processes of this name are, and tell the user once of each."""
        self._of_others = {each for each, reply in replies.items() if reply.incarnation != replies[address].incarnation}
        for each in older:
            if (incarnation := replies[each].incarnation) not in self._told:
                self._told.add(incarnation)
                self._say(
                    f"worker {self.name}: two processes have this name; the one at {address}, which was started later, "
                    f"takes part: end the one at {each}"
                )


def newest(name: str, replies: Mapping[str, HelloReply]) -> tuple[str, list[str]]:
    """Which process to use: the one that was started last of those that call themselves `name`, or of all if none does.

    Args:
        replies: by address, in the order of preference.
    Returns:
        Its first address, and the addresses of other processes that call themselves `name`.
    """
    meant = max(replies.values(), key=lambda reply: (reply.node == name, reply.started))
    address = next(each for each, reply in replies.items() if reply.incarnation == meant.incarnation)
    others = (each for each, reply in replies.items() if reply.incarnation != meant.incarnation)
    return address, [each for each in others if replies[each].node == name]
