"""Command line: `python -m tools.checkpoints KIND OUT_DIR`; `--help` lists the kinds."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from tools.checkpoints import qwen3_omni, qwen3_tts, write_full, write_tiny
from tools.checkpoints.errors import CheckpointError, FolderError
from tools.checkpoints.measure import print_answers, quiet_transformers
from tools.checkpoints.qwen3_tts.configuration import KINDS, SIZES
from tools.checkpoints.qwen_image import write_full_qwen_image, write_tiny_qwen_image
from tools.checkpoints.z_image import write_full_z_image, write_tiny_z_image


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoints",
        description="Writes checkpoints of Qwen2.5-Omni, Qwen3-Omni, Qwen3-TTS, Z-Image and Qwen-Image offline.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, family in (
        ("tiny", "Qwen2.5-Omni"),
        ("tiny-qwen3", "Qwen3-Omni"),
        ("tiny-z-image", "Z-Image"),
        ("tiny-qwen-image", "Qwen-Image-2.1"),
    ):
        tiny = kinds.add_parser(name, help=f"{family} at toy size, random weights, runnable")
        tiny.add_argument("out_dir", type=Path)
        tiny.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    tts = kinds.add_parser("tiny-qwen3-tts", help="Qwen3-TTS at toy size, random weights, runnable")
    tts.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    full_tts = kinds.add_parser("full-qwen3-tts", help="published sizes of Qwen3-TTS, no weights")
    for parser_of_tts in (tts, full_tts):
        parser_of_tts.add_argument("out_dir", type=Path)
        parser_of_tts.add_argument("--kind", dest="model", choices=KINDS, default=KINDS[0], help="of the checkpoint")
        parser_of_tts.add_argument("--size", choices=SIZES, default=SIZES[0], help="1.7B (default) or 0.6B")
    full = kinds.add_parser("full", help="published sizes of Qwen2.5-Omni-7B, no weights (vLLM: load_format dummy)")
    full.add_argument("--weights", action="store_true", help="random weights, too: 21.5 GB")
    full.add_argument("out_dir", type=Path)
    for name, family in (
        ("full-qwen3", "Qwen3-Omni-30B-A3B"),
        ("full-z-image", "Z-Image"),
        ("full-qwen-image", "Qwen-Image-2.1"),
    ):
        full = kinds.add_parser(name, help=f"published sizes of {family}, no weights")
        full.add_argument("out_dir", type=Path)
    return parser


def write(options: argparse.Namespace) -> None:
    """Writes the checkpoint and prints what a tiny one answers."""
    match options.kind:
        case "tiny":
            print_answers(write_tiny(options.out_dir, options.seed))
        case "tiny-qwen3":
            print_answers(qwen3_omni.write_tiny(options.out_dir, options.seed))
        case "tiny-qwen3-tts":
            qwen3_tts.write_tiny(options.out_dir, options.model, options.seed, size=options.size)
        case "full-qwen3-tts":
            qwen3_tts.write_full(options.out_dir, options.model, options.size)
        case "tiny-z-image":
            write_tiny_z_image(options.out_dir, options.seed)
        case "tiny-qwen-image":
            write_tiny_qwen_image(options.out_dir, options.seed)
        case "full":
            write_full(options.out_dir, weights=options.weights)
        case "full-qwen3":
            qwen3_omni.write_full(options.out_dir)
        case "full-z-image":
            write_full_z_image(options.out_dir)
        case "full-qwen-image":
            write_full_qwen_image(options.out_dir)
        case _:
            raise SystemExit(f"unknown kind of checkpoint: {options.kind}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if the outputs fail a check, 2 if the folder cannot be used."""
    options = make_parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_transformers()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other, for minutes on a busy machine
    started = time.monotonic()
    try:
        write(options)
    except (FolderError, OSError) as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 1
    print(f"checkpoints: wrote {options.kind} to {options.out_dir} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
