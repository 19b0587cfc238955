"""One request of the vocoder: collects codec tokens and cuts them into chunks, as they arrive.

Everything here runs on the host, before a chunk reaches the device. The chunks make one waveform because

* the noise of a block is the same whatever the utterance's length: block b is the b-th draw from its seed;
* a chunk's window has a few blocks of look-ahead behind the chunk, which are computed and thrown away;
* the windows of BigVGAN overlap by its receptive field on both sides: each begins that many frames before its first new
  sample, and samples are sent only as far as the frames that they depend on, look-ahead included, are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from omni_actors.engine.models.chunks import ChunkStream
from omni_actors.engine.models.qwen2_5_omni.bigvgan import receptive_frames
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.stage.sound import CHUNKS_AHEAD, Ahead

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniToken2WavConfig

    from omni_actors.engine.models.chunks import ChunkPolicy

# Below this guidance scale transformers skips the unconditional branch.
MIN_GUIDANCE = 1e-5
# Copies of the widest activation that are alive at a time, for the memory estimates: 30 % and 15 % above what an H200
# used.
DIT_COPIES = 4
VOCODER_COPIES = 12
# Blocks in a step while a listener is about to fall silent: 12 ms on an H200, 3 of them independent of the blocks.
LIGHT_BLOCKS = 64


def branches_of(guidance_scale: float) -> int:
    """Number of branches that the network computes: with guidance, the unconditional one, too."""
    return 2 if guidance_scale >= MIN_GUIDANCE else 1


@dataclass(eq=False)
class Carry:
    """What a chunk leaves on the device for the next one of its request.

    `left` is `DitChunk.left`; `mel` f32 [frames, mel_dim] the frames with which the next vocoder window begins.
    """

    left: torch.Tensor | None = None
    mel: torch.Tensor | None = None


@dataclass(frozen=True)
class Code2WavPayload:
    """A validated chunk, in frames and blocks of its own window: the chunk's blocks, then those of the look-ahead.

    Args:
        token_ids: codec tokens of the window.
        noise: f32 [blocks, frames per block, mel_dim], initial latents of the window, on the host.
        times: the solver's points in time.
        blocks: blocks of the chunk itself.
        last: whether the utterance ends with this chunk.
        emit: the frames of the whole utterance that are sent with this chunk: the first, and the one after the last.
        context: frames before `emit[0]` at which `carry.mel` begins.
        keep_from: the frame of the whole utterance from which the next chunk's `carry.mel` begins.
        carry: of the request; written when the chunk is complete.
    """

    token_ids: tuple[int, ...]
    noise: torch.Tensor = field(repr=False)
    voice: str
    times: tuple[float, ...]
    guidance_scale: float
    blocks: int
    last: bool
    emit: tuple[int, int]
    context: int
    keep_from: int
    carry: Carry = field(repr=False)

    @property
    def intervals(self) -> int:
        """Intervals of the solver, one per denoise step; 0 decodes the noise itself."""
        return len(self.times) - 1

    @property
    def branches(self) -> int:
        """2 with guidance, otherwise 1."""
        return branches_of(self.guidance_scale)


class Geometry:
    """The sizes of a vocoder that decide how utterances are cut, and what a chunk takes in memory.

    Args:
        policy: where to cut; None decodes whole utterances.
        kept_itemsize: bytes of an element of the keys and values that a chunk leaves for the next one.
        evaluations: of the network in an interval of the solver; each leaves keys and values of its own.
    """

    def __init__(
        self,
        config: Qwen2_5OmniToken2WavConfig,
        policy: ChunkPolicy | None,
        kept_itemsize: int = 4,
        evaluations: int = 4,
    ) -> None:
        dit = config.dit_config
        self.config = config
        self.policy = policy
        self.mel_dim: int = dit.mel_dim
        self.frames_per_token: int = dit.repeats
        self.frames_per_block: int = dit.block_size
        self.tokens_per_block: int = dit.block_size // dit.repeats
        self.codec_tokens: int = dit.num_embeds + 1
        self.max_tokens: int = dit.max_position_embeddings // dit.repeats
        self.context: int = receptive_frames(config.bigvgan_config)
        self._kept_bytes = kept_itemsize * evaluations

    def kept_bytes(self, intervals: int, branches: int) -> int:
        """Bytes of the keys and values that a chunk leaves for the next one (`Dit.kept_shape`)."""
        dit = self.config.dit_config
        layers = len(dit.look_backward_layers)
        inner: int = dit.head_dim * dit.num_attention_heads
        return intervals * layers * branches * self.frames_per_block * 2 * inner * self._kept_bytes

    def carried_bytes(self, intervals: int, branches: int) -> int:
        """Upper bound of the bytes of a `Carry`: at most twice BigVGAN's context is kept of the mel frames."""
        if self.policy is None:
            return 0
        return self.kept_bytes(intervals, branches) + 4 * 2 * self.context * self.mel_dim

    def job(self, payload: Code2WavPayload) -> DiffusionJob:
        """The job of a chunk, with its device memory: exact for what it holds, an estimate for its steps."""
        frames = 2 * self.context + payload.emit[1] - payload.emit[0]
        held, step, last = self._bytes(len(payload.noise), frames, payload.branches)
        if not payload.last:
            held += self.kept_bytes(payload.intervals, payload.branches)
        share = len(payload.noise) / LIGHT_BLOCKS
        return DiffusionJob(payload, max(1, payload.intervals), step, last, held, share)

    def largest_job_bytes(self, intervals: int, branches: int) -> int:
        """Upper bound of what any chunk of the policy holds and needs in a step, in bytes."""
        if self.policy is None:
            return 0
        # A chunk also sends the frames that its predecessor held back, at most one context.
        frames = 3 * self.context + self.policy.largest * self.frames_per_block
        blocks = self.policy.largest + self.policy.look_ahead
        held, *steps = self._bytes(blocks, frames, branches)
        return held + self.kept_bytes(intervals, branches) + max(steps)

    def _bytes(self, blocks: int, vocoder_frames: int, branches: int) -> tuple[int, int, int]:
        """Bytes of a window's latents with their conditions, and estimates of those of a step and of the last step."""
        dit, vocoder = self.config.dit_config, self.config.bigvgan_config
        frames = blocks * self.frames_per_block
        # The solver keeps the state, its four slopes and a probe; the network its input and some activations.
        network = 2 * dit.hidden_size + DIT_COPIES * dit.hidden_size * max(3, dit.ff_mult)
        step_bytes = 4 * frames * (6 * self.mel_dim + branches * network)
        if self.policy is not None:  # keys and values of one interval: those of the chunk before, and its own
            step_bytes += 2 * self.kept_bytes(1, branches)
        widest, rate, channels = 0, 1, vocoder.upsample_initial_channel
        for factor in vocoder.upsample_rates:
            rate, channels = rate * factor, channels // 2
            widest = max(widest, rate * channels)
        latents = 4 * frames * (self.mel_dim + branches * dit.hidden_size)
        return latents, step_bytes, max(step_bytes, 4 * vocoder_frames * VOCODER_COPIES * widest)


class NoiseBlocks:
    """The initial noise of an utterance: block b is the b-th draw, so no block depends on how many there are."""

    def __init__(self, seed: int, frames: int, mel_dim: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._shape = (frames, mel_dim)
        self._drawn: dict[int, torch.Tensor] = {}
        self._next = 0

    def take(self, begin: int, end: int) -> torch.Tensor:
        """Blocks `begin` to `end`, f32 [end - begin, frames, mel_dim]. Forgets those before `begin`."""
        while self._next < end:
            self._drawn[self._next] = torch.randn(self._shape, generator=self._generator, dtype=torch.float32)
            self._next += 1
        self._drawn = {number: noise for number, noise in self._drawn.items() if number >= begin}
        return torch.stack([self._drawn[number] for number in range(begin, end)])


class Code2WavStream(ChunkStream):
    """A request: collects tokens and cuts them into chunks.

    Args:
        carry: shared by all chunks of the request.
        times: the solver's points in time.
    """

    def __init__(
        self, geometry: Geometry, carry: Carry, voice: str, seed: int, times: tuple[float, ...], guidance_scale: float
    ) -> None:
        sizes = len(times) - 1, branches_of(guidance_scale)
        needed = geometry.carried_bytes(*sizes), geometry.largest_job_bytes(*sizes)
        super().__init__(1, geometry.codec_tokens, geometry.max_tokens, *needed)
        self._geometry, self._carry, self._voice = geometry, carry, voice
        self._times, self._guidance_scale = times, guidance_scale
        self._noise = NoiseBlocks(seed, geometry.frames_per_block, geometry.mel_dim)
        self._block = 0  # where the next chunk begins
        self._emitted = 0  # frames sent

    def close(self) -> None:
        """Free what the last chunk left on the device."""
        self._carry.left = self._carry.mel = None

    def next_job(self) -> DiffusionJob | None:
        """The next chunk, once its tokens and those of its look-ahead are there."""
        policy, total = self._geometry.policy, self._total
        if self.finished:
            return None
        if policy is None:
            return None if total is None else self._job(self._block, total, total, last=True)
        end, window_end = self._cut(policy, self._block)
        return None if self._missing(window_end) else self._job(self._block, end, window_end, last=end == total)

    def ahead(self, sample_rate: int) -> list[Ahead]:
        """The chunks that `next_job` has not returned."""
        geometry, policy, total = self._geometry, self._geometry.policy, self._total
        if policy is None or self.finished:
            return []
        rate = sample_rate / math.prod(geometry.config.bigvgan_config.upsample_rates)  # frames a second
        pieces: list[Ahead] = []
        begin, emitted = self._block, self._emitted
        while len(pieces) < CHUNKS_AHEAD and (total is None or begin < total):
            end, window_end = self._cut(policy, begin)
            share = (window_end - begin) / LIGHT_BLOCKS
            pieces.append(Ahead(emitted / rate, share, max(1, len(self._times) - 1), self._missing(window_end)))
            emitted = self._emit_to(emitted, end, (window_end - end) * geometry.frames_per_block)
            begin = end
        return pieces

    @property
    def _total(self) -> int | None:
        """Blocks of the utterance, once it is complete."""
        return -(-len(self._codes) // self._geometry.tokens_per_block) if self._complete else None

    def _cut(self, policy: ChunkPolicy, begin: int) -> tuple[int, int]:
        """The ends of the chunk that begins at a block, and of its window."""
        total, end = self._total, policy.end(begin)
        window_end = end + policy.look_ahead
        return (end, window_end) if total is None else (min(end, total), min(window_end, total))

    def _missing(self, window_end: int) -> int:
        """Tokens that a window lacks."""
        return 0 if self._complete else max(0, window_end * self._geometry.tokens_per_block - len(self._codes))

    def _emit_to(self, emitted: int, end: int, ahead: int) -> int:
        """The frame after the last one that is sent with a chunk, which has `ahead` frames of look-ahead.

        The vocoder has to wait for the frames behind a sample, except for those of the look-ahead, which it has.
        """
        final = end * self._geometry.frames_per_block
        return max(emitted, final - max(0, self._geometry.context - ahead))

    def _job(self, begin: int, end: int, window_end: int, *, last: bool) -> DiffusionJob:
        geometry = self._geometry
        size, frames_per_block, context = geometry.tokens_per_block, geometry.frames_per_block, geometry.context
        tokens = tuple(self._codes[begin * size : window_end * size])
        frames = len(tokens) * geometry.frames_per_token  # of the window
        final = begin * frames_per_block + (frames if last else (end - begin) * frames_per_block)
        ahead = begin * frames_per_block + frames - final
        emit_to = final if last else self._emit_to(self._emitted, end, ahead)
        payload = Code2WavPayload(
            token_ids=tokens,
            noise=self._noise.take(begin, window_end),
            voice=self._voice,
            times=self._times,
            guidance_scale=self._guidance_scale,
            blocks=end - begin,
            last=last,
            emit=(self._emitted, emit_to),
            context=min(self._emitted, context),
            keep_from=max(0, emit_to - context),
            carry=self._carry,
        )
        self._block, self._emitted = end, emit_to
        return self._return(geometry.job(payload), last=last)
