#!/usr/bin/env bash
# Checks style, types, licences and known vulnerabilities, and runs all tests with the coverage of each package, child
# processes included. The part that keeps all cores busy runs without coverage; the others reach the floors.
#
#   scripts/test.sh [--venv DIR] [PYTEST ARGUMENTS]
#
# With pytest arguments (a folder, -k ...) only those tests run, without the coverage floors. All tests run in parts, two
# at a time except for the last part: those of models and of the HTTP server, which share pipelines, of single modules,
# those that start, kill and stop processes, and those that keep all cores busy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
scripts/setup.sh --venv "$venv"
scripts/install_chromium.sh
scripts/install_helm.sh "$venv"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
unset PYTHONDONTWRITEBYTECODE  # a thousand processes would each compile the package
PATH="$(cd "$venv" && pwd)/bin:$PATH"

scripts/check.sh --venv "$venv" --style
python scripts/audit.py
if [[ $# -gt 0 ]]; then
    exec python -m pytest "$@"
fi
coverage erase
export PYTHONPATH="$PWD/tests/support/startup${PYTHONPATH:+:$PYTHONPATH}"  # imports what is not ours without coverage
status=0
waiting=(tests/chaos tests/nodes tests/process)
# The workers of a spread stage spin, and would starve what runs next to them.
spread=(tests/e2e/test_several_workers.py tests/nodes/test_ranks_over_hosts.py)
parallel=(--durations=15 --numprocesses=2 --dist=loadfile --no-loadscope-reorder)
shared=(tests/e2e tests/http)
coverage run -m pytest "${parallel[@]}" "${shared[@]}" "${spread[@]/#/--ignore=}" || status=$?
coverage run -m pytest "${parallel[@]}" "${waiting[@]/#/--ignore=}" "${shared[@]/#/--ignore=}" || status=$?
coverage run -m pytest "${parallel[@]}" "${waiting[@]}" "${spread[@]/#/--ignore=}" || status=$?
python -m pytest --durations=15 "${spread[@]}" || status=$?
coverage combine --quiet
coverage report
python scripts/coverage_floors.py || status=1
exit "$status"
