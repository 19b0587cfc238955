"""Z-Image in the folders of the published checkpoint: tiny with random weights, or its sizes without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.checkpoints.drawing import drawn
from tools.checkpoints.tokenizer import FULL_TOKENS, TINY_TOKENS, make_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel


@dataclass(frozen=True)
class TinySizes:
    """What may differ between tiny checkpoints; the defaults are those of the one that all tests share."""

    channels: int = 4  # of the latents
    heads: int = 3
    axes: tuple[int, int, int] = (8, 12, 12)  # of a head's width, for the three positions of a token
    lengths: tuple[int, int, int] = (256, 64, 64)  # the most that each of these may be
    layers: int = 3
    refiners: int = 2  # on either side
    vae_widths: tuple[int, ...] = (8, 8, 16, 16)
    text_width: int = 64
    text_heads: int = 4
    text_kv_heads: int = 2
    text_layers: int = 3


TINY = TinySizes()


def tiny_transformer(seed: int = 0, sizes: TinySizes = TINY) -> ZImageTransformer2DModel:
    """Returns the diffusion transformer, float32."""
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=sizes.channels,
        dim=sizes.heads * sum(sizes.axes),
        n_layers=sizes.layers,
        n_refiner_layers=sizes.refiners,
        n_heads=sizes.heads,
        n_kv_heads=sizes.heads,
        cap_feat_dim=sizes.text_width,
        axes_dims=list(sizes.axes),
        axes_lens=list(sizes.lengths),
    )
    return drawn(model, seed, "transformer")


def tiny_vae(seed: int = 0, sizes: TinySizes = TINY) -> AutoencoderKL:
    """Returns the VAE, float32; a latent pixel is 8 pixels wide, as published."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=sizes.vae_widths,
        layers_per_block=1,
        latent_channels=sizes.channels,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return drawn(model, seed, "vae")


def tiny_text_encoder(seed: int = 0, sizes: TinySizes = TINY) -> Any:
    """Returns the text encoder, a Qwen3, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TINY_TOKENS.vocab_size,
        hidden_size=sizes.text_width,
        intermediate_size=128,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=sizes.text_heads,
        num_key_value_heads=sizes.text_kv_heads,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return drawn(Qwen3ForCausalLM(config), seed, "text_encoder")


def make_scheduler(shift: float = 3.0) -> Any:
    """Returns diffusers' scheduler; `shift` is that of its times, 3 for Turbo and 6 for Z-Image."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, use_dynamic_shifting=False, shift=shift)


def tiny_pipeline(seed: int = 0, *, sizes: TinySizes = TINY, shift: float = 3.0) -> ZImagePipeline:
    """Returns diffusers' pipeline of these parts; for `shift` see `make_scheduler`."""
    from diffusers import ZImagePipeline

    return ZImagePipeline(
        scheduler=make_scheduler(shift),
        vae=tiny_vae(seed, sizes),
        text_encoder=tiny_text_encoder(seed, sizes),
        tokenizer=make_tokenizer(TINY_TOKENS),
        transformer=tiny_transformer(seed, sizes),
    )


def full_transformer() -> ZImageTransformer2DModel:
    """Returns the diffusion transformer at its published size, on the device that is set."""
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(axes_lens=[1536, 512, 512])


def full_vae() -> AutoencoderKL:
    """Returns the VAE at its published size, on the device that is set."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def write_full_z_image(folder: Path) -> None:
    """Writes the published sizes and no weights; vLLM fills them with `load_format: dummy`, in each stage.

    Raises FolderError if the folder holds other files.
    """
    from transformers import Qwen3Config

    from tools.checkpoints import claim_folder

    claim_folder(folder, {"kind": "full-z-image"})
    with torch.device("meta"):
        transformer, vae = full_transformer(), full_vae()
    transformer.save_config(folder / "transformer")
    vae.save_config(folder / "vae")
    make_scheduler().save_config(folder / "scheduler")
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=FULL_TOKENS.vocab_size,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ).save_pretrained(folder / "text_encoder")
    make_tokenizer(FULL_TOKENS).save_pretrained(folder / "tokenizer")
    (folder / "model_index.json").write_text('{"_class_name": "ZImagePipeline"}\n', encoding="utf-8")


def write_tiny_z_image(folder: Path, seed: int = 0, *, sizes: TinySizes = TINY) -> None:
    """Writes the checkpoint: `model_index.json` and a folder for each part.

    Raises FolderError if the folder holds other files.
    """
    from tools.checkpoints import claim_folder

    claim_folder(folder, {"kind": "tiny-z-image", "seed": seed})
    tiny_pipeline(seed, sizes=sizes).save_pretrained(folder)
