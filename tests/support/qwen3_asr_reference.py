"""The oracle for Qwen3-ASR: what transformers writes, in float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.reference import one_thread
from tools.checkpoints.asr import transformers_config, transformers_names
from tools.checkpoints.reference import quiet_transformers


class Qwen3AsrReference:
    """transformers' model and processor, with the weights of a checkpoint in the published layout."""

    def __init__(self, folder: Path) -> None:
        quiet_transformers()
        from safetensors.torch import load_file
        from transformers import (
            AutoTokenizer,
            Qwen3ASRFeatureExtractor,
            Qwen3ASRForConditionalGeneration,
            Qwen3ASRForTokenClassification,
        )
        from transformers.models.qwen3_asr import Qwen3ASRProcessor

        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        aligner = "timestamp_token_id" in self.config
        model_class = Qwen3ASRForTokenClassification if aligner else Qwen3ASRForConditionalGeneration
        self.model = model_class(transformers_config(self.config)).eval()
        weights = load_file(folder / "model.safetensors")
        names = transformers_names(weights, aligner)
        self.model.load_state_dict({names[name]: value for name, value in weights.items()})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), tokenizer, tokenizer.chat_template)

    def prompt(self, about: str = "", language: str | None = None) -> str:
        """Returns the prompt of a recording, as Qwen's package writes it."""
        messages = [{"role": "system", "content": about}, {"role": "user", "content": [{"type": "audio"}]}]
        text: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text if language is None else f"{text}language {language}<asr_text>"

    def write(self, sound: np.ndarray, prompt: str, tokens: int) -> tuple[list[int], list[int]]:
        """Returns the prompt's token ids and `tokens` greedy ones that follow.

        Args:
            sound: f32 [samples] at 16 kHz, half a second or more: this extractor makes a shorter one so long.
        """
        given: Any = self.processor(text=[prompt], audio=[sound])
        ids = given["input_ids"][0].tolist()
        with one_thread(), torch.no_grad():
            written = self.model.generate(**given, max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
        return ids, written[0, len(ids) :].tolist()

    def align(self, sound: np.ndarray, text: str) -> list[dict[str, Any]]:
        """Returns the words of a text with their times in seconds, if the checkpoint is an aligner's."""
        mark = "<timestamp><timestamp>"
        words = self.processor.split_words_for_alignment(text)
        said = "".join(f"{word}{mark}" for word in words)
        given: Any = self.processor(text=[f"<|audio_start|><|audio_pad|><|audio_end|>{said}"], audio=[sound])
        with one_thread(), torch.no_grad():
            logits = self.model(**given).logits
        (found,) = self.processor.decode_forced_alignment(
            logits, given["input_ids"], [words], self.config["timestamp_token_id"]
        )
        return list(found)
