#!/usr/bin/env bash
# Runs all tests, also those with the mark `nightly`, with the floors of coverage of each package; then the fuzzers, the
# soak and an hour of chaos, and the search for known vulnerabilities. It takes three hours on two cores, and goes on after
# a failure.
#
#   scripts/nightly.sh [--venv DIR] [PYTEST ARGUMENTS]
#
# With pytest arguments (a folder, -k ...) only those tests run, with what is marked `nightly`, and nothing else.
# Seeds and sizes are drawn anew for each run: OMNI_TEST_SEED is printed at the start, and repeats a run if it is set.
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
export OMNI_TEST_SEED="${OMNI_TEST_SEED:-$(date +%s)}"
echo "nightly: OMNI_TEST_SEED=$OMNI_TEST_SEED"
unset PYTHONDONTWRITEBYTECODE  # a thousand processes would each compile the package
PATH="$(cd "$venv" && pwd)/bin:$PATH"

status=0
all() { # runs a command on all tests of the folders and files that are given
    "$@" -m pytest -m "" --hypothesis-profile=nightly --durations=15 "${given[@]}" || status=$?
}
given=("$@")
if [[ $# -gt 0 ]]; then
    all python
    exit "$status"
fi

# The workers of a stage on several GPUs spin, and would starve what runs next to them: those run alone, and without coverage.
alone=tests/e2e/test_several_workers.py
coverage erase
startup=$PWD/tests/support/startup  # imports what is not ours without coverage
given=(--numprocesses=3 --dist=loadfile --no-loadscope-reorder --ignore="$alone")
PYTHONPATH="$startup${PYTHONPATH:+:$PYTHONPATH}" all coverage run
given=("$alone")
all python
coverage combine --quiet
coverage report
python scripts/coverage_floors.py || status=1

for step in "fuzz_wire.py" "fuzz_wire.py --pictures" "fuzz_http.py" "fuzz_websocket.py" "fuzz_config.py" "soak.py" \
    "soak.py --any-process --minutes 60 --requests 100000" "audit.py"; do
    seed=()
    [[ $step == audit.py ]] || seed=(--seed "$OMNI_TEST_SEED")
    echo "nightly: scripts/$step"
    # shellcheck disable=SC2086  # a script and its flags
    python scripts/$step "${seed[@]}" || { echo "nightly: failed: scripts/$step" >&2; status=1; }
done
exit "$status"
