"""Tiny pipelines of diffusers with random weights, each of its family's own classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

WORDS = 512  # of the tokenizer
GEMMA = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 2}


def padded(tokenizer: PreTrainedTokenizerBase, length: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose texts become so long at most, and exactly so long where a pipeline pads them."""
    short = copy.deepcopy(tokenizer)
    short.model_max_length = length
    return short


def flux2_klein(tokenizer: PreTrainedTokenizerBase) -> Any:
    encoder = Qwen3Config(
        **{**GEMMA, "num_hidden_layers": 28}, **SMALL
    )  # it takes the states of the 9th, 18th and 27th
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4,
        ),
        text_encoder=Qwen3ForCausalLM(encoder),
        tokenizer=tokenizer,
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=48, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
        ),
        is_distilled=False,
    )  # fmt: skip


def stable_diffusion_3(tokenizer: PreTrainedTokenizerBase) -> Any:
    text = CLIPTextConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    short = padded(tokenizer, text.max_position_embeddings)
    t5 = T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32, out_channels=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(8,), latent_channels=4, norm_num_groups=4, use_quant_conv=False,
            use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035,
        ),
        text_encoder=CLIPTextModelWithProjection(text), tokenizer=short,
        text_encoder_2=CLIPTextModelWithProjection(text), tokenizer_2=short,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tokenizer,
    )  # fmt: skip


def sana(tokenizer: PreTrainedTokenizerBase) -> Any:
    blocks = {"encoder_block_types": ("ResBlock",) * 2, "decoder_block_types": ("ResBlock",) * 2}
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(**GEMMA, **SMALL)),
        vae=diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=2, encoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1),
            decoder_block_out_channels=(8, 8), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()), **blocks,
        ),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
            num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=16,
            sample_size=32,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )  # fmt: skip


def stable_audio(tokenizer: PreTrainedTokenizerBase) -> Any:
    return diffusers.StableAudioPipeline(
        vae=diffusers.AutoencoderOobleck(
            encoder_hidden_size=4, downsampling_ratios=[2, 4], decoder_channels=4, decoder_input_channels=4,
            channel_multiples=[1, 2],
        ),
        text_encoder=T5EncoderModel(T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        projection_model=StableAudioProjectionModel(text_encoder_dim=16, conditioning_dim=8, min_value=0, max_value=32),
        tokenizer=padded(tokenizer, 32),
        transformer=diffusers.StableAudioDiTModel(
            sample_size=64, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=8, time_proj_dim=8,
            global_states_input_dim=16, cross_attention_input_dim=8,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"),
    )  # fmt: skip


def ltx2(tokenizer: PreTrainedTokenizerBase) -> Any:
    text = {**GEMMA, **SMALL, "layer_types": ["full_attention"]}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sides = ("video_connector", "audio_connector")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    return diffusers.LTX2Pipeline(
        tokenizer=padded(tokenizer, 16),
        text_encoder=Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)),
        connectors=LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=2, connector_rope_base_seq_len=16, rope_double_precision=False,
            rope_type="split", **{f"{side}_{name}": size for side in sides for name, size in sizes.items()},
        ),
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
            audio_cross_attention_dim=8, num_layers=1, caption_channels=16, rope_type="split",
            rope_double_precision=False,
        ),
        vae=diffusers.AutoencoderKLLTX2Video(
            latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
            decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_type=("spatiotemporal",),
            upsample_residual=(False,), upsample_factor=(1,), patch_size=1, decoder_causal=False,
        ),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8,
        ),
        vocoder=LTX2Vocoder(
            in_channels=16, hidden_channels=8, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
            resnet_kernel_sizes=[3], resnet_dilations=[[1, 3]], output_sampling_rate=16_000,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def wan(tokenizer: PreTrainedTokenizerBase) -> Any:
    return diffusers.WanPipeline(
        tokenizer=padded(tokenizer, 16),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        ),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=16, freq_dim=16,
            ffn_dim=16, num_layers=1,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


BUILT: dict[str, Callable[[PreTrainedTokenizerBase], Any]] = {
    "flux2_klein": flux2_klein,
    "stable_diffusion_3": stable_diffusion_3,
    "sana": sana,
    "stable_audio": stable_audio,
    "ltx2": ltx2,
    "wan": wan,
}


def write(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a pipeline of `BUILT` with random weights, always the same ones."""
    torch.manual_seed(0)
    BUILT[name](tokenizer).save_pretrained(folder / name)
    return folder / name
