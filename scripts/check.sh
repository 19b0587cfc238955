#!/usr/bin/env bash
# Checks style, formatting, types, imports and shell scripts, then runs the unit tests that load neither torch nor vLLM:
# under a minute on two cores; the first time a minute more, in which mypy reads torch and vLLM.
#
#   scripts/check.sh [--venv DIR] [--style]
#
#   --venv DIR   environment that holds the tools (default: .venv; scripts/setup.sh makes it)
#   --style      leave the tests out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
style_only=false
while [[ $# -gt 0 ]]; do
    case "$1" in
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
        --style) style_only=true; shift ;;
        *) echo "check: unknown argument: $1" >&2; exit 2 ;;
    esac
done
[[ ! -d "$venv/bin" ]] || PATH="$(cd "$venv" && pwd)/bin:$PATH"

status=0
check() {
    echo "check: $*"
    "$@" || { echo "check: failed: $*" >&2; status=1; }
}

check ruff check --quiet .
check ruff format --quiet --check .
check mypy
check lint-imports --no-logo
check pre-commit validate-config
echo "check: shellcheck"
shellcheck --external-sources .ci/run launch/*.sh launch/*.sbatch scripts/*.sh tests/launchers/*.bats \
    tests/launchers/stubs/* || status=1
if [[ "$style_only" == false ]]; then
    mapfile -t light < <(grep -LE '^(import|from) (torch|vllm|tools|omni_actors\.engine)' tests/unit/test_*.py)
    echo "check: ${#light[@]} files of unit tests"
    HF_HUB_OFFLINE=1 python -m pytest --quiet --numprocesses=2 "${light[@]}" || status=1
fi
exit "$status"
