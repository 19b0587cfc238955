#!/usr/bin/env bash
# Goes from a clean checkout to a spoken answer: environment, tiny checkpoint, pipeline, one request. Needs no GPU and no
# model download.
#
#   scripts/quickstart.sh [--venv DIR] [PROMPT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
prompt=${1:-"Say something about the sea."}
checkpoint=checkpoints/tiny_qwen2_5_omni

scripts/setup.sh --venv "$venv"
export HF_HUB_OFFLINE=1
[[ -f $checkpoint/model.safetensors ]] || "$venv/bin/python" -m tools.checkpoints tiny "$checkpoint"
"$venv/bin/python" -m omni_actors.launch stage_configs/tiny_qwen2_5_omni.yaml --prompt "$prompt" --save-audio answer.wav
