#!/usr/bin/env bash
# Starts one pipeline on the nodes of a Ray cluster and serves it until Ctrl-C. Call it on a node of the cluster.
#
#   launch/ray.sh CONFIG [ARGUMENTS of omni-actors launch]
#
# Each node of the pipeline (`cluster.nnodes`, --nnodes) gets a Ray node of its own, by a placement group. omni_actors and
# CONFIG must be in the same place on all; keys come from --keys or OMNI_ACTORS_KEYS on this node, or are made for the job.
# All nodes end when one fails or when this script ends, however it does.
#
#   RAY_ADDRESS   HOST:PORT of the cluster's head (default: the cluster that runs here)
#   OMNI_PORT     port of the coordinator on the first node (default: a free one); OMNI_DIR, OMNI_PYTHON: see common.sh
port=${OMNI_PORT:-}
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
config=$1
[[ ! -f "$config" ]] || config=$(realpath "$config") # Ray's workers run in other folders

exec env OMNI_PORT="$port" PYTHONPATH="$OMNI_DIR${PYTHONPATH:+:$PYTHONPATH}" \
    "$OMNI_PYTHON" -m omni_actors.cli.ray_job "$config" "${@:2}"
