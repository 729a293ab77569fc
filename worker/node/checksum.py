"""Reports with a checksum: what the last stage says is as it said it, or refused. Pure."""

import zlib

from protos.brigade_pb2 import Report
from worker.errors import FrameError


def sealed(report: Report) -> Report:
    """The report with its checksum."""
    report.checksum = _checksum(report)
    return report


def check_seal(report: Report, node: str) -> None:
    """Raise FrameError unless the report is as `node` sealed it.

    What is compared is what it says: bytes that say the same are the same.
    """
    found = report.checksum
    report.ClearField("checksum")
    if found != _checksum(report):
        raise FrameError("expected a report as it was sent, got one with a wrong checksum", node=node)


def _checksum(report: Report) -> int:
    return zlib.crc32(report.SerializeToString(deterministic=True))
