"""Qwen3-Omni's vocoder (code2wav): frames of 16 codes to sound, 80 ms a frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig

from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.codec_decoder.runner import CodecRunner
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.engine.models.placeholder import vocoder_spec
from omni_actors.errors import StartupError

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

WEIGHT_PREFIX = "code2wav."


class MeanEmbedding(nn.Module):
    """A frame is the mean of its codes' embeddings; the codebooks lie one after the other in one table."""

    def __init__(self, quantizers: int, codebook_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(quantizers * codebook_size, width))
        self._codebook_size = codebook_size

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [batch, quantizers, frames] to [batch, frames, width]."""
        books = torch.arange(codes.shape[1], device=codes.device)[:, None] * self._codebook_size
        return F.embedding(codes + books, self.weight).mean(1)


def decoder_of(config: Qwen3OmniMoeCode2WavConfig) -> CodecDecoder:
    """The decoder that a checkpoint's configuration describes, with random weights."""
    front = MeanEmbedding(config.num_quantizers, config.codebook_size, config.hidden_size)
    return CodecDecoder(config, front, "code_embedding", trims_start=True)


class Qwen3OmniCode2Wav(CodecRunner):
    """Codes to a waveform at 24 kHz: n frames become 1920 n - 555 samples, as in transformers."""

    def make_decoder(self) -> CodecDecoder:
        """See `CodecRunner.make_decoder`."""
        config = AutoConfig.from_pretrained(self.model_name)
        if getattr(config, "code2wav_config", None) is None or not getattr(config, "enable_audio_output", True):
            raise StartupError(
                f"The checkpoint {self.model_name!r} has no speech parts.",
                hint="Leave the talker and code2wav stages out of the YAML, or use an Instruct checkpoint.",
            )
        return decoder_of(config.code2wav_config)

    def read_weights(self) -> Mapping[str, torch.Tensor]:
        """See `CodecRunner.read_weights`."""
        return dict(read_tensors(self.model_name, WEIGHT_PREFIX))


SPEC = vocoder_spec(Qwen3OmniCode2Wav, "code2wav_config")
