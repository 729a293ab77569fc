"""RDMA over Thunderbolt, of macOS 26.2 and later: developer.apple.com, TN3205. Brigade does not use it."""

import re

from worker.process.commands import Ask


def read_rdma(ask: Ask) -> tuple[str, list[str]]:
    """Its state and its devices; an older macOS has neither of the commands."""
    state = parse_state(ask("rdma_ctl", "status"))
    return state, parse_devices(ask("ibv_devices")) if state == "enabled" else []


def parse_state(text: str) -> str:
    return text.strip() if text.strip() in ("enabled", "disabled") else ""


def parse_devices(text: str) -> list[str]:
    """One per Thunderbolt port, such as rdma_en2; two lines of headings stand before them."""
    return re.findall(r"^\s*(rdma_\w+)", text, re.MULTILINE)
