#!/usr/bin/env bash
# Runs a command under a CUDA MPS daemon of its own, so that the stages on one GPU compute side by side instead of in
# turns:   scripts/with_mps.sh python -m omni_actors.launch stage_configs/qwen2_5_omni.yaml
# The daemon is private (pipes and logs in a temporary folder) and ends with the command. No setting of the GPU changes.
set -euo pipefail
(($#)) || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }
control=$(command -v nvidia-cuda-mps-control || ls /usr/local/nvidia/bin/nvidia-cuda-mps-control)
# A number would be counted twice: by the daemon among all GPUs, and by its clients among those that the daemon has.
if [[ ${CUDA_VISIBLE_DEVICES:-} =~ ^[0-9] ]]; then
  uuids=()
  for number in ${CUDA_VISIBLE_DEVICES//,/ }; do
    uuids+=("$(nvidia-smi --query-gpu=uuid --format=csv,noheader --id="$number")")
  done
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${uuids[*]}"); export CUDA_VISIBLE_DEVICES
fi
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
"$control" -d
# The command takes this process, and with it every signal; somebody else, whom none of them reaches, waits for its end.
# shellcheck disable=SC2016 # these are the other shell's arguments
end='tail --pid="$1" -f /dev/null; echo quit | "$2"; rm -rf "$3"'
(setsid bash -c "$end" end "$$" "$control" "$folder" </dev/null >/dev/null 2>&1 &)
exec "$@"
