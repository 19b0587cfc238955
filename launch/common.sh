# shellcheck shell=bash
# Shared by the launch scripts; sourced, never run. omni_actors.launch decides what a node does.
#
#   OMNI_DIR      directory of omni_actors, the same on all nodes (default: the one that contains this file)
#   OMNI_PYTHON   interpreter there (default: its .venv, else python3)
#   OMNI_PORT     port of the coordinator on the first node (default: 29600)
set -euo pipefail

OMNI_DIR=${OMNI_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
if [[ -z "${OMNI_PYTHON:-}" ]]; then
    OMNI_PYTHON=python3
    [[ ! -x "$OMNI_DIR/.venv/bin/python" ]] || OMNI_PYTHON="$OMNI_DIR/.venv/bin/python"
fi
OMNI_PORT=${OMNI_PORT:-29600}

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

# Prints the comment at the top of the calling script.
usage() { sed -n '2,$ {/^# shellcheck/q; /^#SBATCH/q; s/^# \{0,1\}//p}' "$0" >&2; }

help_if_asked() {
    case "${1:-}" in
        "" | -h | --help)
            usage
            [[ -n "${1:-}" ]] && exit 0 || exit 2
            ;;
    esac
}

# ended PID: waits for a child and returns its exit code, even if signals (counted by their traps) interrupt the wait.
signals=0
ended() {
    local code before=-1
    while [[ $before != "$signals" ]]; do
        before=$signals
        code=0
        wait "$1" || code=$?
    done
    return "$code"
}

# launch_command CONFIG NODES RANK MASTER [ARGUMENTS]: sets `command`.
launch_command() {
    local config=$1 nodes=$2 rank=$3 master=$4
    shift 4
    command=("$OMNI_PYTHON" -m omni_actors.launch "$config")
    command+=(--nnodes "$nodes" --node-rank "$rank" --master-addr "$master" --master-port "$OMNI_PORT")
    [[ "$rank" == 0 ]] || command+=(--headless)
    command+=("$@")
}
