"""Run in a network namespace of its own: one machine with a cable to another. What is asked there is heard, or not."""

import asyncio
import contextlib
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from coordinator.deploy.discovery import browse
from worker.node.announce import About, announcing
from worker.node.log import worker_log

HERE, THERE = "10.9.0.1", "10.9.0.2"
ABOUT = About("mini", "0.1.0", "0a1b2c3d")
GROUP = "224.0.0.251"
LISTENS_S = (0.25, 1, 4, 16)  # a busy machine may need longer ones
# a question for the service's instances, as any resolver may ask it: answers come back to its own port
QUESTION = b"\0\1\0\0\0\1\0\0\0\0\0\0\x08_brigade\x04_tcp\x05local\0\0\x0c\0\x01"


class Told(io.StringIO):
    """What a log has said, and the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_said = asyncio.Event()

    def flush(self) -> None:
        self.is_said.set()


@contextlib.contextmanager
def cable() -> Iterator[int]:
    """A second machine, by the process that it is made of."""
    ip("link set lo up")
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as other:
        while not is_apart(other.pid):
            pass
        ip(f"link add here type veth peer name there netns {other.pid}")
        ip(f"addr add {HERE}/24 dev here")
        ip("link set here up")
        for command in ("link set lo up", f"addr add {THERE}/24 dev there", "link set there up"):
            ip(command, "nsenter", "--net", "--target", str(other.pid))
        try:
            yield other.pid
        finally:
            other.kill()


def is_apart(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def ip(command: str, *before: str) -> None:
    subprocess.run([*before, "ip", *command.split()], check=True)


def asked_from(pid: int, within_s: float) -> bool:
    """Whether the other machine is answered."""
    ask = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        f"s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton({THERE!r})); "
        f"s.settimeout({within_s}); s.sendto({QUESTION!r}, ({GROUP!r}, 5353))\n"
        "try: print(bool(s.recv(9000)))\n"
        "except TimeoutError: print(False)"
    )
    command = ["nsenter", "--net", "--target", str(pid), sys.executable, "-c", ask]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "True\n"


async def loopback(pid: int, out: Told) -> None:
    """A worker on loopback is heard there, and from nowhere else, though this machine hears the other's questions."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        member = socket.inet_aton(GROUP) + socket.inet_aton(HERE)
        other.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        async with announcing(lambda: ABOUT, ["127.0.0.1:50070"], worker_log("mini", out)):
            assert await is_heard_at("127.0.0.1:50070")
            assert not await asyncio.to_thread(asked_from, pid, 1)
    assert not out.getvalue()


async def wildcard(pid: int, out: Told) -> None:
    """A worker on every interface is heard over the cable, and by its address there only."""
    async with announcing(lambda: ABOUT, ["0.0.0.0:50070"], worker_log("mini", out)):
        assert await is_heard_at(f"{HERE}:50070")
        assert await asyncio.to_thread(lambda: any(asked_from(pid, each) for each in LISTENS_S))
    assert not out.getvalue()


async def is_heard_at(expected: str) -> bool:
    """Whether a node is heard at this address and no other; a busy machine may need longer to hear all of it."""
    for listens_s in LISTENS_S:
        if list((await browse(listens_s)).nodes.values()) == [[expected]]:
            return True
    return False


async def run(case: str, pid: int) -> None:
    await {each.__name__: each for each in (loopback, wildcard)}[case](pid, Told())


if __name__ == "__main__":
    with cable() as machine:
        asyncio.run(run(sys.argv[1], machine))
    print("as expected")
