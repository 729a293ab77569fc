#!/usr/bin/env bash
# The whole suite several times beside a program that keeps one core busy, a line per run:
# tools/busy_suite.sh [RUNS] [PYTEST ARGUMENT...]
# Three runs by default, of at most LIMIT_S seconds each. What failed is in the run's log. The exit code is 1 if a run failed.
set -uo pipefail
cd "$(dirname "$0")/.."
runs=${1:-3}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- -m "not long and not matrix" --numprocesses 3 --dist loadfile --no-loadscope-reorder
limit_s=${LIMIT_S:-2700}
python=${PYTHON:-.venv/bin/python}
logs=$(mktemp -d "${TMPDIR:-/tmp}/busy-suite.XXXXXX")

# It ends by itself when this shell is gone, however that ends.
"$python" -c 'import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))' $$ &
busy=$!
trap 'kill "$busy" 2>/dev/null; wait "$busy" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

code=0
for run in $(seq "$runs"); do
  log=$logs/run-$run.log
  begun=$SECONDS
  timeout --kill-after 60 "$limit_s" "$python" -m pytest -q "$@" >"$log" 2>&1
  ended=$?
  kill -0 "$busy" 2>/dev/null || { echo "the busy program has ended: nothing was shown" >&2; exit 2; }
  [ "$ended" -eq 0 ] || code=1
  case $ended in
  0) how=green ;;
  124 | 137) how="not done after $limit_s s" ;;
  *) how=$(grep -c -E '^(FAILED|ERROR) ' "$log" || true)" failed" ;;
  esac
  echo "run $run of $runs: $how, $((SECONDS - begun)) s: $(tail -n 1 "$log") ($log)"
  grep -E '^(FAILED|ERROR) ' "$log" | cut -c 1-200 | sed 's/^/  /'
done
exit "$code"
