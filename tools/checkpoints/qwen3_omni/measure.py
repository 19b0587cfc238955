"""Measures the answers of a Qwen3-Omni checkpoint with transformers and checks them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints.measure import CODEC_TOKENS, MEASURED_PROMPTS, THINKER_TOKENS, Answer, GapRecorder, media_prompts

SAMPLES_PER_FRAME = 1920
LOST_SAMPLES = 555  # the transposed convolutions trim both ends
FRAMES = CODEC_TOKENS - 1  # the last code that the talker samples is never fed, so it makes no frame
WANTED_SAMPLES = FRAMES * SAMPLES_PER_FRAME - LOST_SAMPLES
NO_END = -1  # never sampled


def load_reference_model(folder: Path) -> Any:
    """Returns transformers' model of a checkpoint in float32.

    In transformers 5.19 the talker reads the audio encoder's configuration, which it does not have, where a prompt has
    audio and pictures; here it has it.
    """
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model


def voices_of(model: Any) -> tuple[str, ...]:
    """Returns the voices that a model knows."""
    return tuple(model.config.talker_config.speaker_id)


def measure_answer(model: Any, inputs: dict[str, Any], prompt: str, voice: str) -> Answer:
    """Runs the whole model greedily, for 32 thinker tokens and 63 frames of 16 codes."""
    gaps = GapRecorder(), GapRecorder()
    codes: list[torch.Tensor] = []
    hook = model.code2wav.register_forward_pre_hook(lambda module, args: codes.append(args[0][0]))
    try:
        with warnings.catch_warnings():
            # transformers warns that the penalty leaves the prompt out, as it should.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            sequences, waveform = model.generate(
                **inputs,
                speaker=voice,
                thinker_max_new_tokens=THINKER_TOKENS,
                thinker_do_sample=False,
                thinker_eos_token_id=NO_END,
                thinker_logits_processor=[gaps[0]],
                talker_max_new_tokens=CODEC_TOKENS,
                talker_do_sample=False,
                talker_eos_token_id=NO_END,
                talker_logits_processor=[gaps[1]],
            )
    finally:
        hook.remove()
    first, *others = (tuple(group) for group in codes[0].tolist())
    return Answer(
        prompt=prompt,
        voice=voice,
        thinker_tokens=tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist()),
        codec_tokens=first,
        peak=float(waveform.abs().max()),
        samples=waveform.numel(),
        thinker_gap=gaps[0].smallest,
        codec_gap=gaps[1].smallest,
        other_codes=tuple(others),
    )


def measured_prompts(model: Any, processor: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (name, voice, processor output): texts in every voice, and media in one."""
    voices = voices_of(model)
    for prompt in MEASURED_PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for voice in voices:
            yield prompt, voice, dict(processor(text=text, return_tensors="pt"))
    for name, inputs in media_prompts(processor):
        yield name, voices[0], inputs


def measure_answers(folder: Path) -> list[Answer]:
    """Returns the checkpoint's answers to texts in every voice, and to media in one."""
    from transformers import Qwen3OmniMoeProcessor

    processor = Qwen3OmniMoeProcessor.from_pretrained(folder)
    model = load_reference_model(folder)
    return [measure_answer(model, inputs, name, voice) for name, voice, inputs in measured_prompts(model, processor)]
