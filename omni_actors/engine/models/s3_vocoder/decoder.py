"""Continues utterances of S3 tokens in batches, each in the voice of a recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from omni_actors.engine.models.codec_decoder.runner import batch_sizes
from omni_actors.engine.models.codec_decoder.stream import CodecChunk, DecoderCarry
from omni_actors.engine.models.s3_vocoder.flow import FRAMES, HISTORY, LONGEST, Flow, FlowChunk, FlowState
from omni_actors.engine.models.s3_vocoder.hift import SAMPLE_RATE, SAMPLES, Hift
from omni_actors.engine.models.s3_vocoder.voices import RecordedVoice


@dataclass(frozen=True)
class S3Sizes:
    """See `codec_decoder.stream.Sizes`; a frame is a token.

    Args:
        codebook_size: tokens that there are.
        delay: mel frames that the sound waits for.
        widest: elements per token.
    """

    codebook_size: int
    delay: int
    widest: int
    num_quantizers: int = 1
    max_position_embeddings: int = (LONGEST // FRAMES) // 2  # as many may be of the recording
    sample_rate: int = SAMPLE_RATE

    def samples(self, frames: int) -> int:
        """How many samples can be made of the first tokens while there are more to come."""
        return max(0, FRAMES * frames - self.delay) * SAMPLES


@dataclass(frozen=True)
class S3Speaker:
    """A voice on the device: its recording, what it is to the flow [mels], and the state of the flow after it."""

    voice: RecordedVoice
    embedding: torch.Tensor
    state: FlowState

    @property
    def frames(self) -> int:
        """Mel frames of the recording."""
        return len(self.voice.mel)


@dataclass(eq=False)
class S3Carry(DecoderCarry):
    """The speaker, and as `state` the parts of a `FlowState`, mel frames, samples of the oscillator and its phase."""

    speaker: S3Speaker = field(kw_only=True)


class S3Batches:
    """Decodes chunks of equal length; see `codec_decoder.runner.Batches`.

    Args:
        most: chunks of the largest batch.
        whole: whether chunks are whole utterances, of which every token sees every other.
    """

    def __init__(self, flow: Flow, hift: Hift, most: int, *, whole: bool) -> None:
        self._flow, self._hift, self._most, self._whole = flow, hift, most, whole
        self._device = flow.noise.device
        self._delay = hift.pitch_ahead + hift.ahead
        self._room = 0  # past frames of the longest voice
        rows = next(hift.mix.parameters()).new_zeros
        self._begun = (rows(flow.noise.shape[1], 0), rows(0), rows(hift.mix.in_features, dtype=torch.float64))

    @property
    def sizes(self) -> S3Sizes:
        """Sizes of the decoder."""
        flow, widest = self._flow, SAMPLES * self._hift.after.in_channels
        return S3Sizes(len(flow.encoder.table), self._delay, FRAMES * max(widest, 8 * flow.estimator.width))

    @torch.inference_mode()
    def speaker(self, voice: RecordedVoice) -> S3Speaker:
        """Bring a voice to the device."""
        tokens, mel = voice.tokens.to(self._device), voice.mel.to(self._device)
        embedding = self._flow.voice(voice.embedding.to(self._device))
        read = torch.cat([tokens, tokens[: self._flow.encoder.look_ahead]])
        _, states = self._flow([FlowChunk(read, len(read), embedding, len(mel), self._flow.begun, mel)], last=False)
        self._room = max(self._room, len(mel) + HISTORY)
        return S3Speaker(RecordedVoice(tokens, mel, voice.embedding), embedding, states[0])

    def state_bytes(self, speaker: S3Speaker) -> int:
        """Bytes that an utterance leaves on the device between two chunks, at most."""
        size = sum(part.nbytes for part in speaker.state)
        mel = 4 * (self._hift.behind + self._delay) * (SAMPLES + speaker.voice.mel.shape[1])
        total: int = size + size * HISTORY // speaker.frames + mel
        return total

    def alike(self, chunk: CodecChunk) -> Hashable:
        """Those whose tokens are as many, and are the last or not."""
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
        parts = [chunk.carry.state[-3:] if chunk.carry.state else self._begun for chunk in chunks]
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
            sound, *after = self._sound(mel, source, phase, kept, received, last=last)
            for row, index in enumerate(members):
                sounds[index] = sound[row]
                left[index] = [part[row].clone() for part in after]
        order = range(len(chunks))
        return [sounds[index] for index in order], [None if last else (*states[index], *left[index]) for index in order]

    def _flow_chunk(self, chunk: CodecChunk) -> FlowChunk:
        speaker, tokens = _speaker(chunk), chunk.codes[0].to(self._device)
        count = chunk.count if chunk.last else chunk.frames
        if self._whole:
            voice = speaker.voice
            joined, count = torch.cat([voice.tokens, tokens]), len(voice.tokens) + count
            return FlowChunk(joined, count, speaker.embedding, speaker.frames, self._flow.begun, voice.mel)
        parts = chunk.carry.state
        state = FlowState(*parts[:-3]) if parts else speaker.state
        return FlowChunk(tokens, count, speaker.embedding, speaker.frames, state)

    def _sound(
        self,
        mel: torch.Tensor,
        source: torch.Tensor,
        phase: torch.Tensor,
        kept: int,
        received: Sequence[int],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Samples [batch, time] of the frames that have not sounded, and what is left: mel, source and phase.

        Args:
            mel: [batch, mels, frames], of which `kept` came with chunks before.
            source: [batch, samples], of those of them whose pitch was known.
            received: frames of the utterances before this chunk.
        """
        hift, frames = self._hift, mel.shape[2]
        known, sounded = max(0, kept - hift.pitch_ahead), max(0, kept - self._delay)
        begin = max(0, known - hift.pitch_behind)
        pitch = hift.pitches(mel[..., begin:], last=last)[:, known - begin :]
        places = torch.tensor([before - kept + known for before in received], device=self._device)
        new, phase = hift.source(pitch, phase, places)
        source = torch.cat([source, new], 1)
        known += pitch.shape[1]
        sound = source[:, :0]
        if last or frames - self._delay > sounded:
            sound = hift(mel[..., :known], source, last=last)[:, sounded * SAMPLES :]
        keep = max(0, frames - self._delay - hift.behind)
        return sound, mel[..., keep:], source[:, keep * SAMPLES :], phase

    def capture(self, first: int, lengths: Sequence[int]) -> None:
        """Capture the graphs of chunks that are not the last, of these lengths and the checkpoint's voices."""
        self._flow.capture(batch_sizes(self._most), [FRAMES * length for length in lengths], self._room)


def _speaker(chunk: CodecChunk) -> S3Speaker:
    carry = chunk.carry
    if not isinstance(carry, S3Carry):
        raise TypeError("Chunks of S3 tokens carry their speaker.")
    return carry.speaker
