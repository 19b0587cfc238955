"""Qwen-Image-2.1 in the folders of the published checkpoint: tiny with random weights, or its sizes without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.checkpoints.drawing import drawn
from tools.checkpoints.qwen3_omni.tokens import FULL_TOKENS, TINY_TOKENS
from tools.checkpoints.tokenizer import TokenLayout, make_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel

PATCH, MERGE, FRAMES = 16, 2, 2  # of the vision encoder: pixels of a patch, patches of a token, pictures of a patch
SCHEDULER = {  # as published
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "stochastic_sampling": False,
}


@dataclass(frozen=True)
class TinySizes:
    """What may differ between tiny checkpoints; the defaults are those of the one that all tests share."""

    channels: int = 16  # of the latents
    heads: int = 3
    axes: tuple[int, int, int] = (8, 12, 12)  # of a head's width, for the three positions of a token
    layers: int = 3
    vae_width: int = 8
    text_width: int = 64
    text_heads: int = 4
    text_kv_heads: int = 2
    text_layers: int = 4
    vision_width: int = 32
    vision_heads: int = 2


TINY = TinySizes()


def tiny_transformer(seed: int = 0, sizes: TinySizes = TINY) -> QwenImage21Transformer2DModel:
    """Returns the diffusion transformer, float32."""
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(
        in_channels=sizes.channels,
        out_channels=sizes.channels,
        num_layers=sizes.layers,
        attention_head_dim=sum(sizes.axes),
        num_attention_heads=sizes.heads,
        context_in_dim=sizes.text_width,
        axes_dims_rope=sizes.axes,
    )
    return drawn(model, seed, "transformer")


def tiny_vae(seed: int = 0, sizes: TinySizes = TINY) -> AutoencoderKLQwenImage21:
    """Returns the VAE, float32; a latent pixel is 16 pixels wide, and pictures have four channels, as published."""
    from diffusers import AutoencoderKLQwenImage21

    model = AutoencoderKLQwenImage21(
        base_dim=sizes.vae_width,
        decoder_base_dim=sizes.vae_width,
        z_dim=sizes.channels,
        dim_mult=[1, 2, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1 * index - 0.8 for index in range(sizes.channels)],
        latents_std=[1.0 + 0.1 * index for index in range(sizes.channels)],
    )
    return drawn(model, seed, "vae")


def tiny_text_encoder(seed: int = 0, sizes: TinySizes = TINY) -> Any:
    """Returns the text encoder, a Qwen3-VL with 4 layers in its vision encoder, float32."""
    from transformers import Qwen3VLForConditionalGeneration

    config = _encoder_config(
        TINY_TOKENS,
        text={
            "hidden_size": sizes.text_width,
            "intermediate_size": 128,
            "num_hidden_layers": sizes.text_layers,
            "num_attention_heads": sizes.text_heads,
            "num_key_value_heads": sizes.text_kv_heads,
            "head_dim": 32,
            "max_position_embeddings": 4096,
        },
        sections=[6, 5, 5],
        vision={
            "depth": 4,
            "hidden_size": sizes.vision_width,
            "intermediate_size": 64,
            "num_heads": sizes.vision_heads,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    )
    return drawn(Qwen3VLForConditionalGeneration(config), seed, "text_encoder")


def _encoder_config(layout: TokenLayout, text: dict[str, Any], sections: list[int], vision: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    ids = layout.ids()
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={
            **text,
            "vocab_size": layout.vocab_size,
            "rope_theta": 5e6,
            "rope_parameters": rope,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "tie_word_embeddings": False,
        },
        vision_config={
            **vision,
            "out_hidden_size": text["hidden_size"],
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _processor(layout: TokenLayout) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
    levels: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    tokenizer = make_tokenizer(layout)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 1024, "longest_edge": 16_777_216}, **sizes, **levels
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**sizes, **levels),
        chat_template=tokenizer.chat_template,
    )


def pipeline_of(transformer: Any, vae: Any, text_encoder: Any = None) -> QwenImage21Pipeline:
    """Returns diffusers' pipeline of these parts, with the tiny processor; without an encoder it encodes no prompt."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline

    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=text_encoder,
        processor=_processor(TINY_TOKENS),
        transformer=transformer,
    )


def tiny_pipeline(seed: int = 0, *, sizes: TinySizes = TINY) -> QwenImage21Pipeline:
    """Returns diffusers' pipeline of these parts."""
    return pipeline_of(tiny_transformer(seed, sizes), tiny_vae(seed, sizes), tiny_text_encoder(seed, sizes))


def full_transformer() -> QwenImage21Transformer2DModel:
    """Returns the diffusion transformer at its published size, on the device that is set."""
    from diffusers import QwenImage21Transformer2DModel

    return QwenImage21Transformer2DModel()


def full_vae() -> AutoencoderKLQwenImage21:
    """Returns the VAE at its published size, on the device that is set."""
    from diffusers import AutoencoderKLQwenImage21

    return AutoencoderKLQwenImage21()


def write_tiny_qwen_image(folder: Path, seed: int = 0, *, sizes: TinySizes = TINY) -> None:
    """Writes the checkpoint: `model_index.json` and a folder for each part.

    Raises FolderError if the folder holds other files.
    """
    from tools.checkpoints import claim_folder

    claim_folder(folder, {"kind": "tiny-qwen-image", "seed": seed})
    tiny_pipeline(seed, sizes=sizes).save_pretrained(folder)


def write_full_qwen_image(folder: Path) -> None:
    """Writes the published sizes and no weights; vLLM fills them with `load_format: dummy`, in each stage.

    Raises FolderError if the folder holds other files.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    from tools.checkpoints import claim_folder

    claim_folder(folder, {"kind": "full-qwen-image"})
    with torch.device("meta"):
        transformer, vae = full_transformer(), full_vae()
    transformer.save_config(folder / "transformer")
    vae.save_config(folder / "vae")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_config(folder / "scheduler")
    _encoder_config(
        FULL_TOKENS,
        text={
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
        },
        sections=[24, 20, 20],
        vision={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ).save_pretrained(folder / "text_encoder")
    _processor(FULL_TOKENS).save_pretrained(folder / "processor")
    (folder / "model_index.json").write_text('{"_class_name": "QwenImage21Pipeline"}\n', encoding="utf-8")
