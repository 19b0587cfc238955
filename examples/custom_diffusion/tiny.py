"""Writes a tiny U-Net with random weights as diffusers writes its pipelines, so that the example needs no download.

PYTHONPATH=examples python -m custom_diffusion.tiny checkpoints/tiny_painter
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

from custom_diffusion import LABELS


def write(folder: Path) -> None:
    """Write a checkpoint of about 1 MB, with the same weights each time."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        num_class_embeds=len(LABELS),
    )
    DDIMPipeline(unet, DDIMScheduler()).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
