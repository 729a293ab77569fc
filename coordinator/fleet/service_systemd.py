"""A worker as a unit of its user's systemd, on Linux. remote/shared.sh enables and disables it."""

from coordinator.fleet.found import Found

_UNIT = """\
[Unit]
Description=brigade worker {name}
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory=~
Restart=on-failure
RestartSec=10
TimeoutStopSec=20
UMask=0077
StandardOutput=append:{log}
StandardError=append:{log}

[Install]
WantedBy=default.target
"""


def unit(name: str, found: Found) -> bytes:
    """systemd.service(5). It starts the worker again if it fails: an address may be there later, with its cable."""
    command = " ".join(map(_quoted, found.command(name)))
    return _UNIT.format(name=name, command=command, log=_escaped(found.log(name))).encode()


def _quoted(word: str) -> str:
    """One word of a command line, as systemd.syntax(7) has them."""
    return '"' + _escaped(word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")) + '"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
