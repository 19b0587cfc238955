#!/usr/bin/env bash
# Starts one pipeline on several hosts over ssh and serves it until Ctrl-C. The first host runs the coordinator.
#
#   launch/ssh_nodes.sh HOSTS CONFIG [ARGUMENTS of omni-actors launch]
#
# HOSTS is a file with one host per line, in ssh's notation; `#` starts a comment. The other hosts must reach the first one
# under that name (without `user@`) or under OMNI_MASTER. omni_actors, CONFIG and keys must be in the same place on all.
# All nodes end when one fails or when this script ends, however it does: each node stops when ssh closes its input.
#
#   OMNI_SSH      ssh with options (default: ssh); OMNI_DIR, OMNI_PYTHON, OMNI_PORT: see common.sh
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
[[ $# -ge 2 ]] || fail "give a file of hosts and the pipeline's YAML (--help)"
[[ -r "$1" ]] || fail "cannot read the file of hosts $1"

mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
config=$2
shift 2
[[ ${#hosts[@]} -gt 0 ]] || fail "the file of hosts names no host"
master=${OMNI_MASTER:-${hosts[0]#*@}}
read -ra ssh <<< "${OMNI_SSH:-ssh}"
ssh+=(-o BatchMode=yes -o ServerAliveInterval=2 -o ServerAliveCountMax=2 -o SendEnv='OMNI_ACTORS_*')

# Every node reads this pipe, and nothing is ever written to it. It closes with descriptor 9, and so with this process.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/hold"
exec 9<> "$folder/hold"

node() {
    local rank=$1 host=$2 remote command
    shift 2
    exec < "$folder/hold" 9>&-
    launch_command "$config" "${#hosts[@]}" "$rank" "$master" "$@"
    command=(env PYTHONPATH="$OMNI_DIR" "$OMNI_PYTHON" -m omni_actors.launcher.exit_with_stdin "${command[@]}")
    remote="cd $(printf %q "$OMNI_DIR") && exec $(printf '%q ' "${command[@]}")"
    trap '' INT TERM # Ctrl-C reaches every process here; let the nodes stop in order and pass on their output
    "${ssh[@]}" "$host" "$remote" 2>&1 | sed -u "s|^|[$rank $host] |"
}

pids=()
for rank in "${!hosts[@]}"; do
    node "$rank" "${hosts[$rank]}" "$@" &
    pids+=($!)
done

release() {
    signals=$((signals + 1))
    exec 9>&-
}
trap release INT TERM HUP

code=0
wait -n "${pids[@]}" || code=$?
if [[ $signals == 0 ]]; then
    [[ $code == 0 ]] || say "a node ended with exit code $code; ending all"
    release
else
    code=0 # `wait` returned the signal, not a node's exit code
fi
for pid in "${pids[@]}"; do
    other=0
    ended "$pid" || other=$?
    [[ $code != 0 ]] || code=$other
done
exit "$code"
