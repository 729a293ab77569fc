"""How the names of hosts are looked up."""

import subprocess
import sys

HOST = f"{'x' * 64}.invalid"  # a label longer than any: no name server is asked
LOOK_UP = f"""
import coordinator, grpc

with grpc.insecure_channel("{HOST}:1") as channel:
    channel.unary_unary("/a/b")(b"", timeout=10)
"""


def test_names_are_looked_up_as_the_system_does() -> None:
    """gRPC's own resolver would not find those of Bonjour; the system's fails in the words of `getaddrinfo`."""
    done = subprocess.run([sys.executable, "-c", LOOK_UP], capture_output=True, text=True)
    assert f"errors resolving {HOST}" in done.stderr and "getaddrinfo" in done.stderr
