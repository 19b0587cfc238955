#!/usr/bin/env bash
# Goes from a clean checkout to a spoken answer: environment, pipeline, one request. Needs no GPU and no model download:
# the checkpoint that speaks is in examples/speaker.
#
#   scripts/quickstart.sh [--venv DIR] [PROMPT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
if [[ "${1:-}" == "--venv" ]]; then
    venv=${2:?--venv needs a folder}
    shift 2
fi
prompt=${1:-"Say: The children found a small boat near the river."}

scripts/setup.sh --venv "$venv" --without-tests
export HF_HUB_OFFLINE=1
"$venv/bin/python" -m omni_actors.launch stage_configs/tiny_speaker.yaml --prompt "$prompt" --save-audio answer.wav
played=
for player in afplay aplay; do # macOS, Linux
    if [[ -z $played ]] && command -v "$player" > /dev/null && "$player" answer.wav > /dev/null 2>&1; then
        played=" and was played"
    fi
done
echo "quickstart: the answer is in $PWD/answer.wav$played; to talk to it in a browser: $venv/bin/omni-actors launch stage_configs/tiny_speaker.yaml --http 127.0.0.1:8000"
