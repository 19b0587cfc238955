"""Command line: `python -m tools.checkpoints KIND OUT_DIR`; `--help` lists the kinds."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints import CheckpointError, FolderError, asr, minicpm, omni, tts
from tools.checkpoints.measure import print_answers, quiet_transformers
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE

# Each takes the folder and the options of its command, and may return answers.
WRITERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tiny": ("Qwen2.5-Omni at toy size, random weights, runnable", omni.write_tiny),
    "tiny-qwen3": (
        "Qwen3-Omni at toy size, random weights, runnable",
        partial(omni.write_tiny, family=omni.QWEN3_OMNI),
    ),
    "tiny-qwen3-tts": ("Qwen3-TTS at toy size, random weights, runnable", tts.write_tiny),
    "tiny-qwen3-asr": ("Qwen3-ASR at toy size, random weights, runnable", asr.write_tiny),
    "tiny-qwen3-aligner": ("Qwen3-ForcedAligner, likewise", partial(asr.write_tiny, aligner=True)),
    "tiny-minicpm-o": ("MiniCPM-o 4.5 at toy size, random weights, runnable", minicpm.write_tiny),
    "tiny-z-image": ("Z-Image at toy size, random weights, runnable", Z_IMAGE.write_tiny),
    "tiny-qwen-image": ("Qwen-Image-2.1 at toy size, random weights, runnable", QWEN_IMAGE.write_tiny),
    "tiny-flux2-klein": ("FLUX.2 klein at toy size, random weights, runnable", FLUX2_KLEIN.write_tiny),
    "full": ("published sizes of Qwen2.5-Omni-7B, no weights (vLLM: load_format dummy)", omni.write_full),
    "full-qwen3": (
        "published sizes of Qwen3-Omni-30B-A3B, no weights",
        partial(omni.write_full, family=omni.QWEN3_OMNI),
    ),
    "full-qwen3-tts": ("published sizes of Qwen3-TTS, no weights", tts.write_full),
    "full-qwen3-asr": ("published sizes of Qwen3-ASR, no weights", asr.write_full),
    "full-qwen3-aligner": ("published sizes of its aligner, no weights", partial(asr.write_full, aligner=True)),
    "full-minicpm-o": ("published sizes of MiniCPM-o 4.5, weights of the vocoder alone", minicpm.write_full),
    "full-z-image": ("published sizes of Z-Image, no weights", Z_IMAGE.write_full),
    "full-qwen-image": ("published sizes of Qwen-Image-2.1, no weights", QWEN_IMAGE.write_full),
    "full-flux2-klein": ("published sizes of FLUX.2 klein 4B, no weights", FLUX2_KLEIN.write_full),
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoints", description="Writes checkpoints of models of speech and pictures offline."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, _) in WRITERS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("out_dir", type=Path)
        if name.startswith("tiny"):
            command.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
        if name.endswith("tts"):
            command.add_argument("--kind", choices=tts.KINDS, default=tts.KINDS[0], help="of the checkpoint")
        if name.endswith("tts") or name == "full-qwen3-asr":
            command.add_argument("--size", choices=tts.SIZES, default=tts.SIZES[0], help="1.7B (default) or 0.6B")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if the outputs fail a check, 2 if the folder cannot be used."""
    options = vars(make_parser().parse_args(arguments))
    name, folder = options.pop("command"), options.pop("out_dir")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_transformers()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other, for minutes on a busy machine
    started = time.monotonic()
    try:
        if answers := WRITERS[name][1](folder, **options):
            print_answers(answers)
    except (FolderError, OSError) as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 1
    print(f"checkpoints: wrote {name} to {folder} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
