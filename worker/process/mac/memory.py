"""How much memory the GPU may wire down, as the user has set it: `sysctl iogpu.wired_limit_mb`."""

import re

from worker.process.commands import Ask


def read_wired_limit(ask: Ask) -> int | None:
    """MiB; 0 leaves it to macOS. None where that is not known."""
    return parse_limit(ask("sysctl", "-n", "iogpu.wired_limit_mb"))


def parse_limit(text: str) -> int | None:
    found = text.strip()
    return int(found) if re.fullmatch("[0-9]{1,9}", found) else None
