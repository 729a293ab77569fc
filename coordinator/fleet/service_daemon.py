"""A worker as a plain process, on a Linux without a systemd of the user: nobody starts it again. Its script writes the
file with its number, by which remote/shared.sh finds and stops it."""

import shlex

from coordinator.fleet.found import Found

_SCRIPT = """\
#!/bin/sh
cd {home} || exit 1
echo $$ >{pid_file}
exec {command}
"""


def script(name: str, found: Found) -> bytes:
    """What becomes the worker."""
    pid_file = shlex.quote(f"{found.folder(name)}/worker.pid")
    return _SCRIPT.format(
        home=shlex.quote(found.home), pid_file=pid_file, command=shlex.join(found.command(name))
    ).encode()
