"""The decoder of Qwen3-TTS's codec (code2wav): frames of 16 codes to sound, 80 ms a frame."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCausalConvNet

from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.codec_decoder.runner import CodecRunner
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.engine.models.placeholder import vocoder_spec
from omni_actors.engine.models.qwen3_tts.prompt import CODEC_FOLDER, codec_config

WEIGHT_PREFIX = "decoder."
LEAST_USAGE = 1e-5  # of an entry of a codebook, as in the codec's training
PARTS = ("rvq_first", "rvq_rest")


class SummedCodebooks(nn.Module):
    """A frame is the sum of its codes' vectors, which a convolution joins with the frames before."""

    def __init__(self, quantizers: int, codebook_size: int, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(quantizers * codebook_size, size))
        self.pre_conv = Qwen3OmniMoeCausalConvNet(size, width, 3)
        self._codebook_size = codebook_size

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [batch, quantizers, frames] to [batch, frames, width]."""
        books = torch.arange(codes.shape[1], device=codes.device)[:, None] * self._codebook_size
        vectors = F.embedding(codes + books, self.weight).sum(1)
        joined: torch.Tensor = self.pre_conv(vectors.transpose(1, 2))
        return joined.transpose(1, 2)


def codebook_vectors(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The vectors of all codebooks, one after the other, [quantizers x entries, size], of the quantizer's tensors.

    A codebook is kept as sums and counts of what its entries stand for; each part has a projection after it.
    """
    vectors = []
    for part in PARTS:
        projection = weights[f"{part}.output_proj.weight"][..., 0].float()
        for index in range(sum(name.startswith(f"{part}.vq.") and name.endswith("_sum") for name in weights)):
            codebook = f"{part}.vq.layers.{index}._codebook"
            usage = weights[f"{codebook}.cluster_usage"].float().clamp(min=LEAST_USAGE)
            entries = weights[f"{codebook}.embedding_sum"].float() / usage[:, None]
            vectors.append(entries @ projection.T)
    return torch.cat(vectors)


class Qwen3TtsCode2Wav(CodecRunner):
    """Codes to a waveform at 24 kHz: n frames become 1920 n samples."""

    def make_decoder(self) -> CodecDecoder:
        """See `CodecRunner.make_decoder`."""
        codec = codec_config(self.model_name)
        config = Qwen3OmniMoeCode2WavConfig(**codec["decoder_config"])
        front = SummedCodebooks(config.num_quantizers, config.codebook_size, config.codebook_dim, config.latent_dim)
        rate = codec["output_sample_rate"]
        return CodecDecoder(config, front, "front", width=config.latent_dim, trims_start=False, sample_rate=rate)

    def read_weights(self) -> Mapping[str, torch.Tensor]:
        """See `CodecRunner.read_weights`."""
        weights = dict(read_tensors(self.model_name, WEIGHT_PREFIX, CODEC_FOLDER))
        quantizer = {
            name.removeprefix("quantizer."): weights.pop(name)
            for name in list(weights)
            if name.startswith("quantizer.")
        }
        joined = {f"front.{name}": weights.pop(name) for name in list(weights) if name.startswith("pre_conv.")}
        return weights | joined | {"front.weight": codebook_vectors(quantizer)}


SPEC = vocoder_spec(Qwen3TtsCode2Wav, "talker_config")
