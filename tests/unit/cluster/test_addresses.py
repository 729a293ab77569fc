"""Of several addresses the one that is used, as a table: who answers where, and since when it runs."""

import pytest

from coordinator.cluster.addresses import newest
from protos.brigade_pb2 import HelloReply


def at(text: str) -> dict[str, HelloReply]:
    """`cable=mini-a@1 wifi=mini-b@2`: addresses, the name of whoever answers there, its process, its start."""
    replies = {}
    for part in text.split():
        address, _, who = part.partition("=")
        process, _, started = who.partition("@")
        replies[address] = HelloReply(node=process.split("-")[0], incarnation=process, started=int(started))
    return replies


@pytest.mark.parametrize(
    ("answers", "address", "older"),
    [
        ("cable=mini-a@1 wifi=mini-a@1", "cable", []),
        ("wifi=mini-a@1", "wifi", []),
        ("cable=mini-a@1 wifi=mini-b@2", "wifi", ["cable"]),
        ("cable=mini-b@2 wifi=mini-a@1", "cable", ["wifi"]),
        ("cable=mini-a@1 wifi=mini-b@2 relay=mini-b@2", "wifi", ["cable"]),
        ("cable=mini-a@1 wifi=mini-a@1 relay=mini-b@2", "relay", ["cable", "wifi"]),
        ("cable=air-b@2 wifi=mini-a@1", "wifi", []),  # somebody else's by now
        ("cable=air-b@2", "cable", []),
    ],
)
def test_the_first_address_of_the_newest_process_with_the_name(answers: str, address: str, older: list[str]) -> None:
    assert newest("mini", at(answers)) == (address, older)
