#!/usr/bin/env bash
# Records the surface of a checkout: tests/surface/record.sh CHECKOUT [SECTION...]
# PYTHON has the packages; the checkout's own code comes before what is installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$1" && pwd)
shift
python=${PYTHON:-$here/../../.venv/bin/python}
mkdir -p "$here/recorded"
[ $# -gt 0 ] || set -- flags exits printed lines kinds served
PYTHONPATH=$checkout "$python" "$here/record.py" "$here/recorded" "$@"
