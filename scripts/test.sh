#!/usr/bin/env bash
# Checks style, types and licences, then runs the tests that every change needs: a quarter of an hour on two idle cores.
#
#   scripts/test.sh [--venv DIR] [PYTEST ARGUMENTS]
#
# With pytest arguments (a folder, -k ...) only those tests run. scripts/nightly.sh runs all there are, with coverage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
if [[ "$(uname -m)" == x86_64 ]]; then
    flags=" $(sed -n 's/^flags[^:]*: //p;/^flags/q' /proc/cpuinfo) "
    has() { if [[ "$flags" == *" $1 "* ]]; then echo yes; else echo no; fi; }
    echo "test: models need a CPU with AVX2 (here: $(has avx2)); AVX-512 is used if it is there (here: $(has avx512f))"
fi
scripts/setup.sh --venv "$venv"
scripts/install_chromium.sh
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
unset PYTHONDONTWRITEBYTECODE  # a thousand processes would each compile the package
PATH="$(cd "$venv" && pwd)/bin:$PATH"

checked() { scripts/check.sh --venv "$venv" --style && python scripts/audit.py --licences; }
if [[ $# -gt 0 ]]; then
    checked
    exec python -m pytest "$@"
fi
# Style, types and licences beside the first part: alone they keep one core busy for minutes, and the other idle.
found=$(mktemp)
checked > "$found" 2>&1 &
checking=$!
trap 'kill "$checking" 2> /dev/null || true; rm "$found"' EXIT
# In two parts: what kills and stops processes does not run beside models, and its workers load none. Three workers for
# two cores, then five: many tests wait for most of their time, those of processes for more than half of it. Beside other
# work up to three more, each with its share of the cores.
read -r load _ < /proc/loadavg
more=$((${load%.*} > 5 ? 3 : ${load%.*} > 3 ? 1 : 0))
status=0
processes=(tests/chaos tests/launchers tests/nodes tests/process)
parallel=(--durations=15 --dist=loadfile --no-loadscope-reorder)
python -m pytest "${parallel[@]}" --numprocesses=$((3 + more)) "${processes[@]/#/--ignore=}" || status=$?
wait "$checking" || status=$?
cat "$found"
python -m pytest "${parallel[@]}" --numprocesses=$((5 + more)) "${processes[@]}" || status=$?
exit "$status"
