"""Prompts and replies as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.speaker.corpus import SYSTEM
from tools.speaker.layout import load_tokenizer

Ids = npt.NDArray[np.int64]


class Prompts:
    """The tokenizer, and the chat template around a user's message."""

    def __init__(self, work: Path) -> None:
        self.tokenizer = load_tokenizer(work / "model")
        self.end = int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self.audio = int(self.tokenizer.convert_tokens_to_ids("<|AUDIO|>"))

    def wrap(self, message: str, system: str = SYSTEM) -> str:
        """Returns the whole prompt of a user's message."""
        return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the token ids of each text."""
        return [np.array(ids, np.int64) for ids in self.tokenizer(list(texts))["input_ids"]] if texts else []
