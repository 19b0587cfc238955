"""The tokens of Qwen3-Omni: published special tokens and template, made-up words."""

from __future__ import annotations

from tools.checkpoints.tokenizer import TokenLayout, chat_template

# The published names, in the published order.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
# Like the published template without its tools: no default system prompt, and one placeholder per media part.
CHAT_TEMPLATE = chat_template(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    audio="<|audio_start|><|audio_pad|><|audio_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)
ROLES = {"system": 8948, "user": 872, "assistant": 77091}


def make_layout(vocab_size: int, first_special: int, fixed: dict[str, int]) -> TokenLayout:
    """Returns a layout with Qwen3-Omni's special tokens from `first_special` on; the voices are no text tokens."""
    return TokenLayout(
        vocab_size=vocab_size,
        first_special=first_special,
        first_speech=first_special,
        voices={},
        fixed=fixed,
        special=SPECIAL_TOKENS,
        speech=(),
        named=NAMED_TOKENS,
        template=CHAT_TEMPLATE,
    )


def tiny_layout(vocab_size: int) -> TokenLayout:
    """Returns a layout whose special tokens are among the last 42 ids."""
    return make_layout(vocab_size, vocab_size - 42, {})


TINY_TOKENS = tiny_layout(512)
FULL_TOKENS = make_layout(152064, 151643, ROLES)
