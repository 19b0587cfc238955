"""The oracle for CosyVoice 2 in float32 on the CPU: transformers' Qwen2, and the vocoder of `minicpmo-utils`.

The package has the model's language model, too, but only for a GPU. What is here around transformers' layers is what
that and the model's public code do (`Qwen2LM.inference`, `ras_sampling`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import soundfile
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2Model

from omni_actors.engine.models.s3_vocoder.voices import RecordedVoice, VoiceEncoder
from tests.support.reference import one_thread
from tools.checkpoints.cosyvoice import END, LAYERS

SPECIAL = "<|im_start|> <|im_end|> <|endofprompt|> [breath] <strong> </strong> [noise] [laughter] [cough] [clucking] "
SPECIAL += "[accent] [quick_breath] <laughter> </laughter> [hissing] [sigh] [vocalized-noise] [lipsmack] [mn]"


class CosyVoiceReference:
    """The talker of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / LAYERS / "config.json").read_text(encoding="utf-8"))
        self.weights = torch.load(folder / "llm.pt")
        self.layers = Qwen2Model(Qwen2Config(**config)).eval()
        name = "llm.model.model."
        self.layers.load_state_dict(
            {key.removeprefix(name): each for key, each in self.weights.items() if key.startswith(name)}
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder / LAYERS)
        self.tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL.split()})
        self._folder = folder
        self._encoder = VoiceEncoder(folder, "speech_tokenizer_v2.onnx")

    def voice(self, name: str) -> RecordedVoice:
        """A recording of the checkpoint."""
        return self._encoder(*soundfile.read(self._folder / "asset" / f"{name}.wav", dtype="float32"))

    @torch.no_grad()
    def speak(self, text: str, before: str = "", sounds: Sequence[int] = ()) -> list[int]:
        """S3 tokens, greedily, without the one that ends them.

        Args:
            before: what is said in the recording, or instructions with their mark.
            sounds: S3 tokens of the recording.
        """
        made, longest = list[int](), 20 * len(self.tokenizer(text)["input_ids"])
        while len(made) < longest:
            code = self.likeliest(text, made, before, sounds)[-1]
            if code >= END:
                break
            made.append(code)
        return made

    @torch.no_grad()
    def likeliest(self, text: str, codes: Sequence[int], before: str = "", sounds: Sequence[int] = ()) -> list[int]:
        """The likeliest token at the place of each of these codes, and after them."""
        ids = self.tokenizer(text)["input_ids"]
        read = (self.tokenizer(before)["input_ids"] if before else []) + ids
        begin, speech = self.weights["llm_embedding.weight"].split(1)
        table = self.weights["speech_embedding.weight"]
        parts = [begin, self.layers.embed_tokens.weight[read], speech, table[[*sounds, *codes]]]
        with one_thread():
            states = self.layers(inputs_embeds=torch.cat(parts)[None], use_cache=False).last_hidden_state[0]
        logits = states[-len(codes) - 1 :] @ self.weights["llm_decoder.weight"].T + self.weights["llm_decoder.bias"]
        logits[: 2 * len(ids), END:] = -torch.inf
        found: list[int] = logits.argmax(1).tolist()
        return found
