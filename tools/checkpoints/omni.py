"""Checkpoints of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.checkpoints import claim_folder
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.reference import AUDIO_RATE
from tools.checkpoints.tokenizer import TokenLayout, make_tokenizer
from tools.checkpoints.weights import draw_weights, make_voices, spoken_token_ids

ROLES = ("system", "user", "assistant")
VOICES_FILE = "spk_dict.pt"  # of Qwen2.5-Omni; Qwen3-Omni's voices are in the configuration


def _derive(sizes: Sizes) -> dict[str, Any]:
    # A quarter of the head's frequencies is for time, the rest for height and width. The codec tokens of Qwen2.5-Omni
    # lie as in the published model: the sounds from 0, a gap, the special ones.
    words, sounds, eighth = sizes["vocabulary"], sizes["sounds"], sizes["head_width"] // 8
    return {
        "first_special": words - 32,
        "first_speech": words - 12,
        "voices": {"Ethan": words - 6, "Chelsie": words - 5},
        "width": sizes["heads"] * sizes["head_width"],
        "sections": [eighth, 3 * eighth // 2, 3 * eighth // 2],
        "codec_vocabulary": sounds + 32,
        "codes": sounds + 1,
        **{f"codec_{name}": sounds + 12 + index for index, name in enumerate(("pad", "start", "end"))},
        "codec_mask": sounds + 16,
        "dit_width": sizes["dit_head_width"] * sizes["dit_heads"],
        "dit_ahead": [sizes["dit_layers"] // 2],
        "dit_backward": [0, sizes["dit_layers"] - 1],
    }


def _derive_qwen3(sizes: Sizes) -> dict[str, Any]:
    sounds = sizes["sounds"]
    return derived_codes(sizes) | {
        "first_special": sizes["vocabulary"] - 42,
        "speakers": {name: sounds + 43 + index for index, name in enumerate(("chelsie", "ethan", "aiden"))},
    }


def derived_codes(sizes: Sizes) -> dict[str, Any]:
    """Returns the ids of a tiny talker's codes, as far from one another as the published ones, and its rotary parts.

    transformers forbids the talker the last 1024 ids of its vocabulary, except the end, in a model of any size.
    """
    gaps = {"pad": 20, "start": 21, "end": 22, "think": 26, "no_think": 27, "think_start": 28, "think_end": 29}
    return {f"codec_{name}": sizes["sounds"] + gap for name, gap in gaps.items()} | {
        "codec_vocabulary": sizes["sounds"] + 1024,
        "sections": [3 * sizes["head_width"] // 16, *[5 * sizes["head_width"] // 32] * 2],
    }


# vLLM's attention on CPU needs heads of 32 or more. As in the published models, the width of a talker's head is not its
# width / heads, so code that assumes so fails here, too. Qwen3's talker takes the thinker's states from above the
# layers that see the picture's deeper features (`states_layer`). The windows of its audio encoder (2 s) and of its
# vocoder are short, so that a short request has several of them.
QWEN2_5_OMNI = Family("qwen2_5_omni", _derive)
QWEN3_OMNI = Family("qwen3_omni", _derive_qwen3)
# Under the first of these names vLLM knows the thinker.
ARCHITECTURES = {QWEN2_5_OMNI: "Qwen2_5OmniModel", QWEN3_OMNI: "Qwen3OmniMoeForConditionalGeneration"}
MARKS = {QWEN2_5_OMNI: "", QWEN3_OMNI: "-qwen3"}


def make_config(family: Family, sizes: Sizes, tokenizer: Any) -> Any:
    """Returns the configuration of a model of these sizes."""
    from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

    roles = {role: tokenizer.convert_tokens_to_ids(role) for role in ROLES}
    config_class = Qwen2_5OmniConfig if family is QWEN2_5_OMNI else Qwen3OmniMoeConfig
    config = config_class(**family.fill("configuration", sizes, roles))
    config.architectures = [ARCHITECTURES[family]]
    config.dtype = sizes["dtype"]
    return config


def make_generation_config(layout: TokenLayout) -> Any:
    """Returns the thinker's generation settings: its end and padding tokens."""
    from transformers import GenerationConfig

    ids = layout.ids()
    return GenerationConfig(
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=False,
    )


def make_processor(family: Family, sizes: Sizes, tokenizer: Any) -> Any:
    """Returns the processor of text, audio, images and video.

    Qwen2.5-Omni pads audio to `audio_seconds`. Images are scaled down to `max_pixels`.
    """
    import transformers

    patch = family.table["configuration"]["thinker_config"]["vision_config"]["patch_size"]
    vision = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 56 * 56}
    mels = {"feature_size": 128, "sampling_rate": AUDIO_RATE, "hop_length": 160, "n_fft": 400}
    return getattr(transformers, "Qwen2_5OmniProcessor" if family is QWEN2_5_OMNI else "Qwen3OmniMoeProcessor")(
        image_processor=transformers.Qwen2VLImageProcessor(**vision, max_pixels=sizes["max_pixels"]),
        video_processor=transformers.Qwen2VLVideoProcessor(**vision, max_pixels=sizes["max_pixels"]),
        feature_extractor=transformers.WhisperFeatureExtractor(**mels, chunk_length=sizes["audio_seconds"]),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def _write_rest(family: Family, folder: Path, sizes: Sizes, tokenizer: Any, config: Any, seed: int) -> None:
    """Writes all but weights and generation settings."""
    config.save_pretrained(folder)
    make_processor(family, sizes, tokenizer).save_pretrained(folder)
    (folder / VOICES_FILE).unlink(missing_ok=True)
    if family is QWEN2_5_OMNI:
        dit = config.token2wav_config.dit_config
        voices = make_voices(sizes["voices"], seed, mel_dim=dit.mel_dim, speaker_dim=dit.enc_emb_dim)
        torch.save(voices, folder / VOICES_FILE)


def write_tiny(folder: Path, seed: int = 0, *, family: Family = QWEN2_5_OMNI, sizes: Sizes | None = None) -> None:
    """Writes a tiny checkpoint.

    Raises FolderError if the folder holds other files.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

    claim_folder(folder, {"kind": f"tiny{MARKS[family]}", "seed": seed})
    chosen = family.tiny_sizes(sizes)
    layout = family.layout(chosen)
    tokenizer = make_tokenizer(layout)
    config = make_config(family, chosen, tokenizer)
    old = family is QWEN2_5_OMNI
    model_class = Qwen2_5OmniForConditionalGeneration if old else Qwen3OmniMoeForConditionalGeneration
    model = model_class(config).to(torch.float32)
    draw_weights(model, seed, spoken_token_ids(tokenizer), chosen["sounds"])
    model.generation_config = make_generation_config(layout)
    model.save_pretrained(folder)
    config.architectures = [ARCHITECTURES[family]]  # saving the model has written its class name there
    _write_rest(family, folder, chosen, tokenizer, config, seed)


def write_full(folder: Path, *, family: Family = QWEN2_5_OMNI) -> None:
    """Writes the checkpoint with the published sizes and no weights.

    Raises FolderError like `write_tiny`.
    """
    claim_folder(folder, {"kind": f"full{MARKS[family]}"})
    layout = family.layout(family.published)
    tokenizer = make_tokenizer(layout)
    config = make_config(family, family.published, tokenizer)
    make_generation_config(layout).save_pretrained(folder)
    _write_rest(family, folder, family.published, tokenizer, config, 0)
