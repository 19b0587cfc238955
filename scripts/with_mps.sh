#!/usr/bin/env bash
# Runs a command under a CUDA MPS daemon of its own, so that the stages on one GPU compute side by side instead of in
# turns:   scripts/with_mps.sh omni-actors serve stage_configs/qwen2_5_omni.yaml
# The daemon is private (pipes and logs in a temporary folder) and ends with the command. No setting of the GPU changes.
set -euo pipefail
(($#)) || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }
control=$(command -v nvidia-cuda-mps-control || ls /usr/local/nvidia/bin/nvidia-cuda-mps-control)
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
"$control" -d
trap 'echo quit | "$control" >/dev/null 2>&1 || true; rm -rf "$folder"' EXIT
"$@"
