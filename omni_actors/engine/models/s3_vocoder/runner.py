"""The stage of an S3 vocoder: continues utterances of S3 tokens in batches, each in the voice of a recording.

A family says where its files are, and which recordings are its voices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from omni_actors.engine.models.chunks import ChunkPolicy
from omni_actors.engine.models.codec_decoder.decoder import Sizes
from omni_actors.engine.models.codec_decoder.runner import ChunkRunner, CodecChunk, Cutting, DecoderCarry, batch_sizes
from omni_actors.engine.models.s3_vocoder.flow import FRAMES, HISTORY, LONGEST, Flow, FlowChunk, voice_of
from omni_actors.engine.models.s3_vocoder.hift import SAMPLE_RATE, SAMPLES, Hift, OverlapHift
from omni_actors.engine.models.s3_vocoder.unet import SECOND, UnetFlow
from omni_actors.engine.models.s3_vocoder.voices import TOKENIZER, RecordedVoice, VoiceEncoder, read_recording
from omni_actors.engine.models.s3_vocoder.weights import Weights
from omni_actors.engine.rows import moved
from omni_actors.errors import ConfigError, StartupError, UnknownVoice
from omni_actors.stage.engine_interface import EngineFacts, StageRequest


@dataclass(frozen=True)
class S3Speaker:
    """A voice on the device: its recording, what it is to the flow [mels], and the state of the flow after it."""

    voice: RecordedVoice
    embedding: torch.Tensor
    state: Any  # of the flow

    @property
    def frames(self) -> int:
        """Mel frames of the recording."""
        return len(self.voice.mel)


@dataclass(eq=False)
class S3Carry(DecoderCarry):
    """The speaker, and as `state` the parts of the state of the flow, and what `Hift.stream` leaves."""

    speaker: S3Speaker = field(kw_only=True)


class S3Batches:
    """Decodes chunks of equal length; see `codec_decoder.runner.Batches`.

    Args:
        most: chunks of the largest batch.
        whole: whether chunks are whole utterances, of which every token sees every other.
    """

    def __init__(self, flow: Flow, hift: Hift, most: int, *, whole: bool) -> None:
        self._flow, self._hift, self._most = flow, hift, most
        self._whole = whole and not flow.recomputes  # which always joins the recording and the utterance
        self._device = flow.noise.device
        self._room = 0  # past frames of the longest voice

    @property
    def sizes(self) -> Sizes:
        """Sizes of the decoder; a frame is a token. The sound waits for some mel frames of what is to come."""
        flow, delay, widest = self._flow, self._hift.delay, SAMPLES * self._hift.shaping.after.in_channels
        longest = (LONGEST // FRAMES) // 2  # as many may be of the recording
        widest = FRAMES * max(widest, 8 * flow.estimator.width)
        tokens = len(flow.encoder.table)
        return Sizes(1, tokens, longest, SAMPLE_RATE, widest, lambda frames: max(0, FRAMES * frames - delay) * SAMPLES)

    def policy(self, policy: ChunkPolicy, speaker: S3Speaker) -> ChunkPolicy:
        """Where to cut an utterance: so that its chunks end where the flow's seconds do, which the recording begins."""
        return replace(policy, shift=-len(speaker.voice.tokens) % SECOND) if self._flow.recomputes else policy

    @torch.inference_mode()
    def speaker(self, voice: RecordedVoice) -> S3Speaker:
        """Bring a voice to the device."""
        tokens, mel = voice.tokens.to(self._device), voice.mel.to(self._device)
        embedding = voice_of(self._flow.speaker, voice.embedding.to(self._device))
        read = torch.cat([tokens, tokens[: self._flow.encoder.look_ahead]])
        _, states = self._flow([FlowChunk(read, len(read), embedding, len(mel), self._flow.begun, mel)], last=False)
        self._room = max(self._room, len(mel) + HISTORY)
        return S3Speaker(RecordedVoice(tokens, mel, voice.embedding), embedding, states[0])

    def state_bytes(self, speaker: S3Speaker) -> int:
        """Bytes that an utterance leaves on the device between two chunks, at most."""
        mel = 4 * (self._hift.behind + self._hift.delay) * (SAMPLES + speaker.voice.mel.shape[1])
        size: int = self._flow.state_bytes(speaker.state, speaker.frames) + mel
        return size

    def alike(self, chunk: CodecChunk) -> Hashable:
        """Those whose tokens are as many, and are the last or not."""
        if self._flow.recomputes:
            return chunk.last
        return chunk.frames, chunk.last, _speaker(chunk).frames if self._whole else 0

    def decode(self, chunks: Sequence[CodecChunk]) -> tuple[list[torch.Tensor], list[Sequence[torch.Tensor] | None]]:
        """See `codec_decoder.runner.Batches`."""
        last = chunks[0].last
        mels, states = self._flow([self._flow_chunk(chunk) for chunk in chunks], last=last)
        before = [_speaker(chunk).frames if self._whole else 0 for chunk in chunks]
        fresh = [
            mel[skipped : skipped + FRAMES * chunk.count].T
            for chunk, mel, skipped in zip(chunks, mels, before, strict=True)
        ]
        parts = [chunk.carry.state[-3:] if chunk.carry.state else self._hift.begun for chunk in chunks]
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, ((tail, *_), new) in enumerate(zip(parts, fresh, strict=True)):
            alike[tail.shape[1], new.shape[1]].append(index)
        sounds: dict[int, torch.Tensor] = {}
        left: dict[int, Sequence[torch.Tensor]] = {}
        for members in alike.values():
            mel = torch.stack([torch.cat([parts[index][0], fresh[index]], 1) for index in members])
            source, phase = (torch.stack([parts[index][part] for index in members]) for part in (1, 2))
            received = [FRAMES * chunks[index].position for index in members]
            kept = parts[members[0]][0].shape[1]
            sound, *after = self._hift.stream(mel, source, phase, kept, received, last=last)
            for row, index in enumerate(members):
                sounds[index] = sound[row]
                left[index] = [part[row].clone() for part in after]
        order = range(len(chunks))
        return [sounds[index] for index in order], [None if last else (*states[index], *left[index]) for index in order]

    def _flow_chunk(self, chunk: CodecChunk) -> FlowChunk:
        speaker, tokens = _speaker(chunk), chunk.codes[0]
        count = chunk.count if chunk.last else chunk.count + self._flow.encoder.look_ahead
        if self._whole or self._flow.recomputes:  # with tokens that are there
            tokens = moved(tokens, self._device)
        if self._whole:
            voice = speaker.voice
            joined, count = torch.cat([voice.tokens, tokens]), len(voice.tokens) + count
            return FlowChunk(joined, count, speaker.embedding, speaker.frames, self._flow.begun, voice.mel)
        parts = chunk.carry.state
        state = type(speaker.state)(*parts[:-3]) if parts else speaker.state
        given = speaker.voice.mel if self._flow.recomputes else None
        return FlowChunk(tokens, count, speaker.embedding, speaker.frames, state, given)

    def capture(self, first: int, lengths: Sequence[int]) -> None:
        """Capture the graphs of chunks of these lengths and the checkpoint's voices; a last one may be longer."""
        sizes, longest = batch_sizes(self._most), max(lengths) + self._flow.encoder.look_ahead
        self._flow.capture(sizes, lengths, self._room)
        self._hift.capture(sizes, [FRAMES * length for length in (*lengths, longest)])


def _speaker(chunk: CodecChunk) -> S3Speaker:
    carry = chunk.carry
    if not isinstance(carry, S3Carry):
        raise TypeError("Chunks of S3 tokens carry their speaker.")
    return carry.speaker


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
