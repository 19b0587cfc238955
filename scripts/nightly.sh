#!/usr/bin/env bash
# Runs the tests that take too long for every change: those with the mark `nightly`.
#
#   scripts/nightly.sh [--venv DIR] [PYTEST ARGUMENTS]
#
# Seeds and sizes are drawn anew for each run: OMNI_TEST_SEED is printed at the start, and repeats a run if it is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
scripts/setup.sh --venv "$venv"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export OMNI_TEST_SEED="${OMNI_TEST_SEED:-$(date +%s)}"
echo "nightly: OMNI_TEST_SEED=$OMNI_TEST_SEED"
PATH="$(cd "$venv" && pwd)/bin:$PATH"

python -m pytest --durations=15 --numprocesses=2 --dist=loadfile --no-loadscope-reorder -m nightly "$@"
