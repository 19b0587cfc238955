"""Measures a checkpoint's answers with transformers and checks them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

MEASURED_PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog.")
THINKER_TOKENS = 32
CODEC_TOKENS = 64
MIN_DISTINCT = 10
PEAK_RANGE = (0.05, 0.95)
AUDIO_RATE = 16000
SAMPLES_PER_CODEC_TOKEN = 480
# Of Qwen3-Omni. The last code that its talker samples is never fed, so it makes no frame, and the transposed
# convolutions of its vocoder trim both ends.
FRAMES = CODEC_TOKENS - 1
FRAME_SAMPLES = FRAMES * 1920 - 555
NO_END = -1  # never sampled


def keep_talker_attention_mask(model: Any) -> None:
    """Makes the talker of a loaded transformers model receive its attention mask of ones.

    transformers 5.19 drops an all-ones mask in `generate()`, and the talker adds the embeddings of the codec's pad and
    start tokens to its prompt only `if attention_mask is not None`. Without this, an unpadded prompt gets a talker
    that differs from the published one. Only this instance is changed.
    """
    talker = model.talker
    original_forward = talker.forward

    @wraps(original_forward)  # generate() validates its arguments against the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
            batch, length = (kwargs["input_ids"] if embeds is None else embeds).shape[:2]
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["attention_mask"] = torch.ones(batch, past + length, dtype=torch.long)
        return original_forward(*args, **kwargs)

    talker.forward = forward


@dataclass(frozen=True)
class Answer:
    """The checkpoint's answer to one prompt in one voice."""

    prompt: str
    voice: str
    thinker_tokens: tuple[int, ...]
    codec_tokens: tuple[int, ...]  # of the first codebook
    peak: float
    samples: int
    other_codes: tuple[tuple[int, ...], ...] = ()  # of the other codebooks, where there are any


def generate_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns a processor's output as keyword arguments for the `generate()` of Qwen2.5-Omni.

    transformers 5.19 passes arguments without a prefix to all three parts, and the talker refuses pixels.
    """
    pixels = ("pixel_values", "pixel_values_videos")
    return {f"thinker_{name}" if name in pixels else name: value for name, value in inputs.items()}


def is_qwen3(folder: Path) -> bool:
    """Returns whether a checkpoint is Qwen3-Omni's; else it is Qwen2.5-Omni's."""
    return bool(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3_omni_moe")


def load_reference_model(folder: Path) -> Any:
    """Returns transformers' model of a checkpoint in float32, with two errors of transformers 5.19 mended.

    For Qwen2.5-Omni see `keep_talker_attention_mask`. Qwen3-Omni's talker reads the audio encoder's configuration,
    which it does not have, where a prompt has audio and pictures; here it has it.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

    if is_qwen3(folder):
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        model.talker.config.audio_config = model.config.thinker_config.audio_config
        return model
    older = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    keep_talker_attention_mask(older)
    return older


def voices_of(model: Any) -> tuple[str, ...]:
    """Returns the voices that a model knows."""
    return tuple(getattr(model, "speaker_map", None) or model.config.talker_config.speaker_id)


def measure_answer(model: Any, inputs: dict[str, Any], prompt: str, voice: str) -> Answer:
    """Runs the whole model greedily, for 32 tokens of the thinker and 64 of the talker."""
    talker = model.config.talker_config
    codes: list[torch.Tensor] = []  # [1, codes] or [1, codebooks, codes]
    if hasattr(model, "token2wav"):
        vocoder, arguments = model.token2wav, generate_arguments(inputs)
        thinker = model.config.thinker_config
        codec_ends = [talker.tts_codec_end_token_id, talker.tts_codec_pad_token_id]
        ends = [thinker.eos_token_id, thinker.pad_token_id], codec_ends
    else:
        vocoder, arguments, ends = model.code2wav, inputs, ([NO_END], [NO_END])
    hook = vocoder.register_forward_pre_hook(lambda module, args: codes.append(torch.atleast_2d(args[0][0])))
    random_state = torch.get_rng_state()
    torch.manual_seed(0)  # the vocoder's initial noise
    try:
        with warnings.catch_warnings():
            # transformers warns that the penalty leaves the prompt out, as it should.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            sequences, waveform = model.generate(
                **arguments,
                speaker=voice,
                thinker_max_new_tokens=THINKER_TOKENS,
                thinker_do_sample=False,
                thinker_eos_token_id=ends[0],
                talker_max_new_tokens=CODEC_TOKENS,
                talker_do_sample=False,
                talker_eos_token_id=ends[1],
            )
    finally:
        hook.remove()
        torch.set_rng_state(random_state)
    first, *others = (tuple(group) for group in codes[0].tolist())
    return Answer(
        prompt=prompt,
        voice=voice,
        thinker_tokens=tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist()),
        codec_tokens=first,
        peak=float(waveform.abs().max()),
        samples=waveform.numel(),
        other_codes=tuple(others),
    )


def media_prompts(processor: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, processor output): the same question about different sounds, images and videos."""
    time_axis = np.arange(AUDIO_RATE, dtype=np.float32) / AUDIO_RATE
    ramp = np.linspace(0, 255, 84 * 84 * 3).reshape(84, 84, 3).astype(np.uint8)
    for name, pitch, picture in (("first", 220.0, ramp), ("second", 660.0, np.ascontiguousarray(ramp[::-1]))):
        tone = np.sin(2 * np.pi * pitch * time_axis)
        film = np.stack([picture, picture // 2])
        contents = {"audio": {"audio": [tone]}, "image": {"images": [picture]}, "video": {"videos": [film]}}
        for media, content in contents.items():
            messages = [{"role": "user", "content": [{"type": media}, {"type": "text", "text": "What is this?"}]}]
            text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            yield f"{media}, {name}", dict(processor(text=text, **content, return_tensors="pt"))


def measure_answers(folder: Path) -> list[Answer]:
    """Returns the checkpoint's answers to texts in every voice, and to media in one."""
    from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor

    processor_class = Qwen3OmniMoeProcessor if is_qwen3(folder) else Qwen2_5OmniProcessor
    processor = processor_class.from_pretrained(folder)
    model = load_reference_model(folder)
    voices = voices_of(model)
    answers = []
    for prompt in MEASURED_PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = dict(processor(text=text, return_tensors="pt"))
        answers += [measure_answer(model, inputs, prompt, voice) for voice in voices]
    return answers + [measure_answer(model, inputs, name, voices[0]) for name, inputs in media_prompts(processor)]


def failed_checks(answers: list[Answer]) -> list[str]:
    """Returns a sentence for every check that the answers fail."""
    missed = []
    for answer in answers:
        who = f"{answer.prompt!r} ({answer.voice})"
        older = CODEC_TOKENS, CODEC_TOKENS * SAMPLES_PER_CODEC_TOKEN
        codec_tokens, wanted_samples = (FRAMES, FRAME_SAMPLES) if answer.other_codes else older
        if len(answer.thinker_tokens) != THINKER_TOKENS or len(answer.codec_tokens) != codec_tokens:
            missed.append(f"{who}: a reply ended before its length limit")
        if len(set(answer.thinker_tokens)) < MIN_DISTINCT:
            missed.append(f"{who}: only {len(set(answer.thinker_tokens))} different thinker tokens")
        for codes in (answer.codec_tokens, *answer.other_codes):
            if len(set(codes)) < MIN_DISTINCT:
                missed.append(f"{who}: only {len(set(codes))} different codec tokens")
        if not PEAK_RANGE[0] <= answer.peak <= PEAK_RANGE[1]:
            missed.append(f"{who}: waveform peak {answer.peak:.3f} outside {PEAK_RANGE}")
        if answer.samples != wanted_samples:
            missed.append(f"{who}: {answer.samples} samples instead of {wanted_samples}")
    texts, prompts = ({one.thinker_tokens for one in answers}, {one.prompt for one in answers})
    if len(texts) != len(prompts):
        missed.append(f"{len(prompts)} prompts, but only {len(texts)} different replies")
    if len({answer.codec_tokens for answer in answers}) != len(answers):
        missed.append("two prompts or voices got the same codec tokens")
    return missed


def print_answers(answers: list[Answer]) -> None:
    """Prints one line per answer."""
    print(f"{'prompt':32} {'voice':8} {'texts':>5} {'codes':>5} {'peak':>6}")
    for answer in answers:
        distinct = len(set(answer.thinker_tokens)), len(set(answer.codec_tokens))
        print(f"{answer.prompt:32} {answer.voice:8} {distinct[0]:5} {distinct[1]:5} {answer.peak:6.3f}")


def quiet_transformers() -> None:
    """Silences warnings of transformers that do not apply.

    It compares all ids of the talker's configuration with the talker's vocabulary, even those of text tokens.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
