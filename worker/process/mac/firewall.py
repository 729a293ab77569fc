"""The application firewall, from `socketfilterfw`."""

import os
import sys
from pathlib import Path

from worker.process.commands import Ask

_TOOL = Path(os.sep, "usr", "libexec", "ApplicationFirewall", "socketfilterfw")


def read_firewall(ask: Ask) -> str:
    program = os.path.realpath(sys.executable)
    questions = (("--getglobalstate",), ("--getblockall",), ("--getappblocked", program))
    return parse_firewall(*(ask(str(_TOOL), *question) for question in questions))


def parse_firewall(state: str, block_all: str, program: str) -> str:
    """As `Facts.firewall` has it. "Firewall is enabled. (State = 1)"; 2 is the state in which it blocks all."""
    if "State = " not in state:
        return ""
    if "State = 0" in state:
        return "off"
    if "State = 2" in state or "set to enabled" in block_all:
        return "blocks all"
    return "blocks this program" if "is blocked" in program else "on"
