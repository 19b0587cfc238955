"""The stage of an S3 vocoder. A family says where its files are, and which recordings are its voices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import torch

from omni_actors.engine.models.chunks import ChunkPolicy
from omni_actors.engine.models.codec_decoder.runner import ChunkRunner
from omni_actors.engine.models.codec_decoder.stream import Cutting
from omni_actors.engine.models.s3_vocoder.decoder import S3Batches, S3Carry, S3Speaker
from omni_actors.engine.models.s3_vocoder.flow import Flow
from omni_actors.engine.models.s3_vocoder.hift import Hift, OverlapHift
from omni_actors.engine.models.s3_vocoder.unet import UnetFlow
from omni_actors.engine.models.s3_vocoder.voices import TOKENIZER, VoiceEncoder, read_recording
from omni_actors.engine.models.s3_vocoder.weights import Weights
from omni_actors.errors import ConfigError, StartupError, UnknownVoice
from omni_actors.stage.engine_interface import EngineFacts, StageRequest

SEED = 0  # of the noise of all utterances
OUTPUT = "decoder.estimator.final_proj.weight"  # of a `Unet`; the other flow has none


class S3Runner(ChunkRunner):
    """S3 tokens to a waveform at 24 kHz: n tokens become 960 n samples.

    Attributes:
        tokenizer: name of the file of the model that makes tokens of recordings.
    """

    # Up to the second of speech that such flows are used with. The first, with the look-ahead, is three messages of a
    # talker that sends four tokens at a time, and gives 0.2 s of sound, in which the next chunk is made.
    chunks = ChunkPolicy(first=9, largest=25, look_ahead=0)
    # Of the flow, as its package has it: the frames are at 51 dB of those in float32, in bfloat16 they were at 30.
    auto_precision: ClassVar[Mapping[str, str]] = {"cuda": "bf16", "cpu": "float32"}
    half = torch.float16
    batches: S3Batches
    tokenizer: ClassVar[str] = TOKENIZER

    @abstractmethod
    def folder(self) -> Path:
        """Where `flow.pt`, `hift.pt` and the models of recordings are."""

    @abstractmethod
    def recordings(self) -> Mapping[str, Path]:
        """The voices: name -> sound file. The first is that of requests that name none."""

    @property
    def facts(self) -> EngineFacts:
        """Voices, sample rate, and the longest utterance in tokens."""
        return msgspec.structs.replace(super().facts, voices=tuple(self._speakers))

    def load(self, *, dummy: bool) -> None:
        """Read both networks and encode the voices; the sizes stand in the files, so `dummy` changes nothing.

        Raises:
            ConfigError: chunks are too short.
            StartupError: a file is missing or of another model.
        """
        folder = self.folder()
        weights, shaping = Weights.read(folder / "flow.pt"), Weights.read(folder / "hift.pt")
        unet = OUTPUT in weights
        flow = UnetFlow(weights, SEED) if unet else Flow(weights, SEED)
        hift = OverlapHift(shaping, SEED) if unet else Hift(shaping, SEED)
        if self.policy is not None and self.policy.first < hift.least:
            raise ConfigError(f"decode.first_blocks is {self.policy.first}; this decoder needs at least {hift.least}.")
        flow.prepare(self.device, self.dtype)
        self.batches = S3Batches(flow, hift.to(self.device), self.max_requests, whole=self.policy is None)
        look_ahead = 0 if self.policy is None else flow.encoder.look_ahead
        self.cutting = Cutting(self.batches.sizes, self.policy, 0, self.dtype.itemsize, look_ahead)
        self._speakers = self._encode(VoiceEncoder(folder, self.tokenizer))

    def _encode(self, encoder: VoiceEncoder) -> dict[str, S3Speaker]:
        speakers = {}
        for name, path in self.recordings().items():
            speakers[name] = self.batches.speaker(encoder(*read_recording(path)))
        if not speakers:
            raise StartupError(f"{self.model_name!r} has no recording of a voice.", hint="Download it completely.")
        return speakers

    def begin(self, request: StageRequest) -> tuple[Cutting, S3Carry]:
        """See `ChunkRunner`. Raises `UnknownVoice`."""
        name = request.voice if request.voice is not None else next(iter(self._speakers))
        if name not in self._speakers:
            raise UnknownVoice(f"There is no voice {name!r}; the voices are {', '.join(self._speakers)}.")
        speaker = self._speakers[name]
        if self.policy is None:
            return self.cutting, S3Carry(speaker=speaker)
        state_bytes, policy = self.batches.state_bytes(speaker), self.batches.policy(self.policy, speaker)
        return replace(self.cutting, state_bytes=state_bytes, policy=policy), S3Carry(speaker=speaker)
