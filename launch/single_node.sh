#!/usr/bin/env bash
# Starts a pipeline on this host and serves it until Ctrl-C.
#
#   launch/single_node.sh CONFIG [ARGUMENTS of omni-actors launch]
#
# For instance: launch/single_node.sh qwen2_5_omni --http 127.0.0.1:8000
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"

exec env PYTHONPATH="$OMNI_DIR${PYTHONPATH:+:$PYTHONPATH}" "$OMNI_PYTHON" -m omni_actors.launch "$@"
