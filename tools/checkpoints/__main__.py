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

from tools.checkpoints import CheckpointError, FolderError, asr, cosyvoice, minicpm, omni, tts
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE
from tools.checkpoints.reference import quiet_transformers

# By family, what it is and who writes it (`write_tiny`, `write_full`) with which further arguments.
FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "": ("Qwen2.5-Omni-7B", omni, {}),
    "-qwen3": ("Qwen3-Omni-30B-A3B", omni, {"family": omni.QWEN3_OMNI}),
    "-qwen3-tts": ("Qwen3-TTS", tts, {}),
    "-qwen3-asr": ("Qwen3-ASR", asr, {}),
    "-qwen3-aligner": ("Qwen3-ForcedAligner", asr, {"aligner": True}),
    "-minicpm-o": ("MiniCPM-o 4.5 (if full, with weights of the vocoder)", minicpm, {}),
    "-cosyvoice2": ("CosyVoice 2 (if full, with weights of the vocoder)", cosyvoice, {}),
    "-z-image": ("Z-Image", Z_IMAGE, {}),
    "-qwen-image": ("Qwen-Image-2.1", QWEN_IMAGE, {}),
    "-flux2-klein": ("FLUX.2 klein 4B", FLUX2_KLEIN, {}),
}
SIZES = {"tiny": "toy size, random weights, runnable", "full": "published sizes, no weights (vLLM: load_format dummy)"}
# By kind, its help, and what takes the folder and the options of its command.
WRITERS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{size}{name}": (f"{about}: {text}", partial(getattr(writer, f"write_{size}"), **given))
    for size, text in SIZES.items()
    for name, (about, writer, given) in FAMILIES.items()
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
    """Runs the command line; returns 0, 1 if a part has no rule, 2 if the folder cannot be used."""
    options = vars(make_parser().parse_args(arguments))
    name, folder = options.pop("command"), options.pop("out_dir")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_transformers()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other, for minutes on a busy machine
    started = time.monotonic()
    try:
        WRITERS[name][1](folder, **options)
    except (CheckpointError, OSError) as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 2 if isinstance(error, FolderError | OSError) else 1
    print(f"checkpoints: wrote {name} to {folder} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
