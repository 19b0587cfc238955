"""CosyVoice 2's vocoder: S3 tokens, 25 a second, to sound in the voice of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omni_actors.engine.models.chunks import ChunkPolicy
from omni_actors.engine.models.cosyvoice2.talker import LAYERS, TOKENIZER, recordings
from omni_actors.engine.models.placeholder import vocoder_spec
from omni_actors.engine.models.s3_vocoder.runner import S3Runner


class CosyVoice2Code2Wav(S3Runner):
    """Tokens to a waveform."""

    chunks = ChunkPolicy(first=25, largest=100, look_ahead=0)  # as the model's own code does, nearly
    tokenizer = TOKENIZER

    def folder(self) -> Path:
        """See `S3Runner`."""
        return Path(self.model_name).parent

    def recordings(self) -> Mapping[str, Path]:
        """See `S3Runner`."""
        return recordings(self.folder())


SPEC = vocoder_spec(CosyVoice2Code2Wav, "intermediate_size", folder=LAYERS)
