"""Measures the pictures of diffusers' pipelines, to compare pictures.py with, on the same GPU and with random weights.

    python benchmarks/vs_diffusers.py --model qwen-image --steps 40 --sizes 1024x1024 512x512

One picture at a time, from the states of a prompt to a PNG file in memory (Pillow's fastest); the text
encoder is left out. `picture_s` is the median of `--rounds` after a shorter one that does not count, `step_ms` what a
step takes on average, `after_ms` the VAE and the file. In bfloat16 at the published sizes, or with
`--size tiny --device cpu` at toy size.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import statistics
import time
from collections.abc import Sequence
from typing import Any

import picture_equality
import pictures
import torch
import workload
from PIL import Image


def timed(models: picture_equality.Family, wanted: picture_equality.Wanted) -> tuple[float, float]:
    """Seconds of a picture's steps, and of the rest."""
    noise = models.noise(wanted)
    began = time.perf_counter()
    latents = models.paint(models.reference, models.vae, wanted, noise)
    if models.device.type == "cuda":
        torch.cuda.synchronize()
    stepped = time.perf_counter()
    Image.fromarray(models.levels(models.vae, latents)).save(io.BytesIO(), "PNG", compress_level=1)
    return stepped - began, time.perf_counter() - stepped


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints the table, and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(picture_equality.FAMILIES), default="z-image")
    parser.add_argument("--size", choices=["tiny", "published"], default="published", help="of the networks")
    parser.add_argument("--sizes", type=pictures.size, nargs="+", default=["1024x1024"], help="of the pictures")
    parser.add_argument("--steps", type=pictures.positive, default=8)
    parser.add_argument("--prompt-tokens", type=pictures.positive, default=100, help="flux2-klein always has 512")
    parser.add_argument("--rounds", type=pictures.positive, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    models = picture_equality.family(options.model, options.size, torch.device(options.device), torch.bfloat16)
    rows = []
    for size in options.sizes:
        width, height = map(int, size.split("x"))
        states = torch.randn(options.prompt_tokens, models.text_width)
        wanted = picture_equality.Wanted(height, width, options.steps, states, 0)
        timed(models, dataclasses.replace(wanted, steps=2))
        steps, rest = zip(*(timed(models, wanted) for _ in range(options.rounds)), strict=True)
        rows.append(
            {
                "model": options.model,
                "size": size,
                "steps": options.steps,
                "picture_s": round(statistics.median(map(sum, zip(steps, rest, strict=True))), 3),
                "step_ms": round(1000 * statistics.median(steps) / options.steps, 1),
                "after_ms": round(1000 * statistics.median(rest)),
            }
        )
        print(rows[-1], flush=True)
    print(workload.table(rows))
    return rows


if __name__ == "__main__":
    main()
