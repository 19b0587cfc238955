#!/usr/bin/env bash
# Trains a checkpoint that speaks, from texts to weights: thinker and DiT side by side at first, then the talker, which
# reads the thinker. The vocoder is trained beside them, and leaves the GPU to the talker in the end. OUT is a copy of
# examples/speaker to train on, or is made with new weights. Needs the teacher (tools/speaker/flite/build.sh),
# wordnet-base, a GPU and some 16 cores.
#
#   tools/speaker/train.sh OUT [SECONDS] [OPTIONS OF python -m tools.speaker train]      default: 1800 seconds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:?train.sh needs a folder for the checkpoint} seconds=${2:-1800}
shift $(($# < 2 ? $# : 2))
early=$((seconds * 2 / 5)) jobs=()
if command -v nvidia-cuda-mps-control >/dev/null; then # kernels of several processes side by side
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) && export CUDA_MPS_PIPE_DIRECTORY
    export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
part() { python -m tools.speaker train "$1" "$out" --device cuda --steps 1000000 --seconds "$2" "${@:3}"; }
begin() { "$@" & jobs+=($!); }
end() { for job in "${jobs[@]}"; do wait "$job"; done; jobs=(); }
# With new weights the thinker learns to hear itself once DiT and vocoder say something.
twice() { part thinker $((early * 3 / 5)) --own 0 "$@" && part thinker $((early * 2 / 5)) "$@"; }
thinker=(part thinker "$early")
[[ -e $out/model.safetensors ]] || { python -m tools.speaker new "$out"; thinker=(twice); }

part vocoder $((seconds * 7 / 10)) --batch 32 --workers 2 --rate 8e-4 "$@" &
vocoder=$!
begin "${thinker[@]}" --batch 192 --workers 7 --rate 1e-3 "$@"
begin part dit $((early * 3 / 5)) --batch 32 --workers 3 --rate 1e-3 "$@"
end
begin part talker $((seconds - early)) --batch 40 --workers 12 --rate 8e-4 "$@"
jobs+=($vocoder)
end
