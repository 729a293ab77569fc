#!/usr/bin/env bash
# Makes .venv with this project in it, in the versions of constraints.txt: with uv where it is there, else with venv and
# pip. `setup.sh dev` adds the test tools.
set -euo pipefail
python=${PYTHON:-python3}
extra=${1:-}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 3))' 2>/dev/null; then
  if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null 2>&1; then
    python='>=3.11.3,<3.15' # uv finds or downloads one; for later ones those versions may have no wheels
  else
    found=$("$python" --version 2>&1 || echo none)
    echo "error: expected Python 3.11.3 or newer, found $found; set PYTHON=/path/to/python3.11, or install uv: https://docs.astral.sh/uv/" >&2
    exit 2
  fi
fi

echo "setting up .venv (once; takes about half a minute)" >&2
if command -v uv >/dev/null 2>&1; then
  uv venv --quiet --allow-existing --python "$python" .venv
  uv pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable . ${extra:+--group "$extra"}
else
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1' # the first that knows dependency groups
  .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable . ${extra:+--group "$extra"}
fi
echo "done: the command is .venv/bin/brigade" >&2
touch .venv/.ready ${extra:+.venv/.ready-$extra}
