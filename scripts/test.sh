#!/usr/bin/env bash
# Checks style, types, licences and known vulnerabilities, and runs all tests with the coverage of each package, child
# processes included.
#
#   scripts/test.sh [--venv DIR] [PYTEST ARGUMENTS]
#
# With pytest arguments (a folder, -k ...) only those tests run, without the coverage floors. All tests run in two parts:
# first those that compute, two at a time; then, one after the other, those that kill, stop and time processes or keep
# all cores busy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
scripts/setup.sh --venv "$venv"
scripts/install_chromium.sh
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
unset PYTHONDONTWRITEBYTECODE  # a thousand processes would each compile the package
PATH="$(cd "$venv" && pwd)/bin:$PATH"

scripts/check.sh --venv "$venv" --style
python scripts/audit.py
if [[ $# -gt 0 ]]; then
    exec python -m pytest "$@"
fi
coverage erase
status=0
# The workers of a spread stage wait by spinning, and would starve what runs next to them.
timed=(tests/chaos tests/nodes tests/process tests/e2e/test_several_workers.py)
parallel=(--numprocesses=2 --dist=loadfile --no-loadscope-reorder)  # the order of the folders: the longest first
coverage run -m pytest --durations=15 "${parallel[@]}" "${timed[@]/#/--ignore=}" || status=$?
coverage run -m pytest --durations=15 "${timed[@]}" || status=$?
coverage combine --quiet
coverage report
python scripts/coverage_floors.py || status=1
exit "$status"
