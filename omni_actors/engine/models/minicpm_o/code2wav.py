"""MiniCPM-o's vocoder: S3 tokens, 25 a second, to sound in the voice of one of the checkpoint's recordings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omni_actors.engine.models.diffusers_layout import checkpoint_folder
from omni_actors.engine.models.minicpm_o import config  # noqa: F401 - registers the configuration
from omni_actors.engine.models.placeholder import vocoder_spec
from omni_actors.engine.models.s3_vocoder.runner import S3Runner

ASSETS = "assets"
VOCODER = "token2wav"


class MiniCpmOCode2Wav(S3Runner):
    """Tokens to a waveform. Each recording in `assets/` is a voice, called like the file; a user may add some."""

    def folder(self) -> Path:
        """See `S3Runner`."""
        return checkpoint_folder(self.model_name) / ASSETS / VOCODER

    def recordings(self) -> Mapping[str, Path]:
        """See `S3Runner`."""
        return {path.stem: path for path in sorted((checkpoint_folder(self.model_name) / ASSETS).glob("*.wav"))}


SPEC = vocoder_spec(MiniCpmOCode2Wav, "tts_config")
