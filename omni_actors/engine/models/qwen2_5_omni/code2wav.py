"""Qwen2.5-Omni's vocoder (token2wav: a diffusion transformer and BigVGAN), for requests of any mix of lengths.

An utterance is decoded in chunks while the talker still speaks. Three things make the chunks one waveform:

* the noise of a block is the same whatever the utterance's length: block b takes the b-th draw of its seed;
* a chunk reads what the chunk before had to its left (see token2wav/dit.py) and computes a few blocks to its right,
  which it throws away: all that differs from the whole decode is that those blocks do not know what follows them;
* BigVGAN gets its whole receptive field (35 frames) on both sides: each window begins as much before its first new
  sample, and the waveform is sent only so far that the frames behind it, those of the look-ahead included, are there.

One step is one interval of the Runge-Kutta solver for all chunks in progress; the last one also decodes the mel frames.
"""

from __future__ import annotations

import json
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniToken2WavModel
from transformers.utils import cached_file

from omni_actors.engine.diffusion_runner import DiffusionJob, DiffusionModelRunner, DiffusionStream, StepResult
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.qwen2_5_omni.bigvgan import FusedVocoder, Vocoder, receptive_frames
from omni_actors.engine.models.qwen2_5_omni.chunks import ChunkPolicy, DecodeOptions
from omni_actors.engine.models.qwen2_5_omni.dit import EVALUATIONS, Dit, DitChunk, solver_times
from omni_actors.engine.models.qwen2_5_omni.voices import load_voices
from omni_actors.engine.worker_base import omni_options
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong, StartupError, UnknownVoice
from omni_actors.protocol.payloads import DIFFUSION_PARAMS, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniToken2WavConfig

SAMPLE_RATE = 24_000
MAX_STEPS = 1000
DUMMY_SEED = 0
WEIGHT_PREFIX = "token2wav."
# Below this guidance scale transformers skips the unconditional branch.
MIN_GUIDANCE = 1e-5
# Copies of the widest activation that live at a time, for the byte estimates: 30 % and 15 % above what an H200 used.
DIT_COPIES = 4
VOCODER_COPIES = 12
# What "auto" means; measured in docs/benchmarks.md.
AUTO_PRECISION = {"cuda": "bf16", "cpu": "float32"}
CHUNKS = ChunkPolicy(first=1, largest=16, look_ahead=1)


@dataclass(eq=False)
class Carry:
    """What a chunk leaves on the device for the next one of its request.

    `left` is `DitChunk.left`; `mel` f32 [frames, mel_dim] the frames that the next vocoder window begins with.
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
        emit: first frame of the whole utterance to be sent with this chunk, and the one after the last.
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
        return len(self.times) - 1

    @property
    def branches(self) -> int:
        return 2 if self.guidance_scale >= MIN_GUIDANCE else 1


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


class Code2WavStream(DiffusionStream):
    """A request: collects tokens and cuts them into chunks."""

    def __init__(self, runner: Qwen2_5OmniCode2Wav, voice: str, seed: int, params: StageParams) -> None:
        self._runner = runner
        self._voice = voice
        self._params = params
        self._times = tuple(solver_times(params.num_steps, params.sway_coefficient).tolist())
        self._frames_per_block = runner.config.dit_config.block_size
        self._tokens_per_block = self._frames_per_block // runner.config.dit_config.repeats
        self._noise = NoiseBlocks(seed, self._frames_per_block, runner.config.dit_config.mel_dim)
        self._tokens: list[int] = []
        self._complete = False
        self._block = 0  # where the next chunk begins
        self._emitted = 0  # frames sent
        self._finished = False
        self.carry = runner.new_carry()

    @property
    def input_tokens(self) -> int:
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        return self._finished

    def close(self) -> None:
        self.carry.left = self.carry.mel = None

    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        runner = self._runner
        if self._complete and (token_ids or not complete):
            raise InvalidRequest("The vocoder got more codec tokens after the last.")
        if len(self._tokens) + len(token_ids) > runner.max_tokens:
            count = len(self._tokens) + len(token_ids)
            raise PromptTooLong(f"{count} codec tokens exceed the vocoder's maximum of {runner.max_tokens}.")
        rows = runner.config.dit_config.num_embeds + 1
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= rows):
            wrong = next(token for token in token_ids if not 0 <= token < rows)
            raise InvalidPayload(f"Codec token {wrong} is outside 0..{rows - 1}.")
        if complete and not self._tokens and not token_ids:
            raise InvalidRequest("The vocoder got no codec token.", hint="Let the talker produce at least one token.")
        self._tokens.extend(token_ids)
        self._complete = complete

    def next_job(self) -> DiffusionJob | None:
        policy, begin = self._runner.policy, self._block
        total = -(-len(self._tokens) // self._tokens_per_block) if self._complete else None
        if self._finished or (policy is None and total is None):
            return None
        if policy is None:
            end = window_end = total
        else:
            end = policy.end(begin)
            window_end = end + policy.look_ahead
            if total is None and len(self._tokens) < window_end * self._tokens_per_block:
                return None
            if total is not None:
                end, window_end = min(end, total), min(window_end, total)
        return self._job(begin, end, window_end, last=end == total)

    def _job(self, begin: int, end: int, window_end: int, *, last: bool) -> DiffusionJob:
        runner, size = self._runner, self._tokens_per_block
        tokens = tuple(self._tokens[begin * size : window_end * size])
        frames = len(tokens) * runner.config.dit_config.repeats  # of the window
        final = begin * self._frames_per_block + (frames if last else (end - begin) * self._frames_per_block)
        # What the vocoder does not see of the future it has to wait for; it does see the look-ahead.
        ahead = begin * self._frames_per_block + frames - final
        emit_to = final if last else max(self._emitted, final - max(0, runner.context - ahead))
        keep_from = max(0, emit_to - runner.context)
        payload = Code2WavPayload(
            token_ids=tokens,
            noise=self._noise.take(begin, window_end),
            voice=self._voice,
            times=self._times,
            guidance_scale=self._params.guidance_scale,
            blocks=end - begin,
            last=last,
            emit=(self._emitted, emit_to),
            context=min(self._emitted, runner.context),
            keep_from=keep_from,
            carry=self.carry,
        )
        self._block, self._emitted, self._finished = end, emit_to, last
        step_bytes, final_bytes = runner.bytes_of(payload)
        return DiffusionJob(payload, max(1, payload.intervals), step_bytes, final_bytes)


@dataclass(frozen=True)
class _Voice:
    """A speaker on the device: f32 `conditioning` [enc_emb_dim], `speaker` and `null_speaker` [enc_dim]."""

    conditioning: torch.Tensor
    speaker: torch.Tensor
    null_speaker: torch.Tensor


@dataclass
class _Latents:
    """A chunk in progress: `state` and `fixed` as in `DitChunk`, and what it keeps for the next chunk."""

    payload: Code2WavPayload
    frames: int
    state: torch.Tensor
    fixed: torch.Tensor
    keep: torch.Tensor | None
    interval: int = 0


def read_tensors(model: str, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose names start with `prefix`, without it, from the safetensors shards that hold any of them.

    `model` is a folder or a hub id. Other shards are not opened. Raises `StartupError` when there is no such tensor.
    """
    index_file = cached_file(model, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index_file is not None:
        with open(index_file, encoding="utf-8") as file:
            weight_map: dict[str, str] = json.load(file)["weight_map"]
        shards = sorted({shard for name, shard in weight_map.items() if name.startswith(prefix)})
    else:
        shards = ["model.safetensors"]
    found = False
    for shard in shards:
        path = cached_file(model, shard, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise StartupError(f"The checkpoint {model!r} has no file {shard!r}.", hint="Download it completely.")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name.startswith(prefix):
                    found = True
                    yield name.removeprefix(prefix), file.get_tensor(name)
    if not found:
        raise StartupError(f"The checkpoint {model!r} has no tensor {prefix}*.", hint="Use a full Omni checkpoint.")


class Qwen2_5OmniCode2Wav(DiffusionModelRunner):
    """Codec tokens to waveform, f32 [samples] at 24 kHz."""

    def __init__(self, vllm_config, device: torch.device) -> None:  # noqa: ANN001 - VllmConfig
        super().__init__(vllm_config, device)
        self.model_name: str = vllm_config.model_config.model
        config: Qwen2_5OmniToken2WavConfig = Qwen2_5OmniConfig.from_pretrained(self.model_name).token2wav_config
        self.config = config
        self.max_tokens = config.dit_config.max_position_embeddings // config.dit_config.repeats
        options = DecodeOptions.from_mapping(omni_options(vllm_config).get("decode") or {}, CHUNKS)
        self.policy = options.policy
        self.precision = options.precision if options.precision != "auto" else AUTO_PRECISION[device.type]
        self.context = receptive_frames(config.bigvgan_config)
        self._max_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._requests: dict[str, _Latents] = {}
        self._voices: dict[str, _Voice] = {}
        self._carries: weakref.WeakSet[Carry] = weakref.WeakSet()

    # ---------------------------------------------------------------------------------------------------- life cycle

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(voices=tuple(self._voices), sample_rate=SAMPLE_RATE, max_input_tokens=self.max_tokens)

    def load(self, *, dummy: bool) -> None:
        # Dummy weights are the same in every process: a restarted stage goes on with the same voice.
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(DUMMY_SEED)
            model = Qwen2_5OmniToken2WavModel._from_config(self.config).float().eval()
        if not dummy:
            weights = dict(read_tensors(self.model_name, WEIGHT_PREFIX))
            missing, unexpected = model.load_state_dict(weights, strict=False)
            if missing or unexpected:
                raise StartupError(
                    f"The vocoder's weights in {self.model_name!r} do not fit its config: missing {missing[:3]}, "
                    f"unexpected {unexpected[:3]} ({len(missing)} and {len(unexpected)} in all).",
                    hint="Check that config.json and the safetensors files belong together.",
                )
        model.requires_grad_(False)
        if self.device.type == "cuda":
            # The worker forbids TF32 for all; whoever runs here alone may allow it.
            torch.backends.cudnn.allow_tf32 = self.precision != "float32"
            torch.backends.cuda.matmul.allow_tf32 = self.precision != "float32"
        dit = model.code2wav_dit_model
        self.dit = Dit(
            dit,
            dtype=torch.bfloat16 if self.precision == "bf16" else torch.float32,
            precise=self.precision == "float32",
            max_requests=self._max_requests,
        )
        bigvgan = model.code2wav_bigvgan_model
        if self.device.type == "cuda" and self.precision != "float32":
            self.vocoder = FusedVocoder(bigvgan, torch.float16 if self.precision == "bf16" else torch.float32)
        else:
            self.vocoder = Vocoder(bigvgan)
        self._load_voices(dit.input_embed.spk_encoder)

    @torch.inference_mode()
    def _load_voices(self, encoder: torch.nn.Module) -> None:
        for name, entry in load_voices(self.model_name).items():
            mel = entry["ref_mel"].to(self.device, torch.float32)
            # The unconditional branch encodes a silent reference of the same length. Both depend on the voice alone.
            speaker, null_speaker = encoder(torch.cat([mel, torch.zeros_like(mel)]))
            conditioning = entry["cond"].to(self.device, torch.float32).reshape(-1)
            self._voices[name] = _Voice(conditioning, speaker, null_speaker)

    def warm_up(self) -> None:
        """Every shape of window that the policy brings, so that no request waits for a kernel to be chosen."""
        if self.device.type == "cuda":
            self.dit.capture()
        request = StageRequest("_warm_up", StageParams(num_steps=2), seed=0)
        blocks = 3 if self.policy is None else 3 * self.policy.largest
        stream = self.open(request, StageInputs(token_ids=[0] * (blocks * self.config.dit_config.block_size // 2)))
        while not stream.finished:
            job = stream.next_job()
            self.add("_warm_up", job)
            for _ in range(job.num_steps):
                self.step(["_warm_up"])
            self.remove("_warm_up")

    # ------------------------------------------------------------------------------------------------------ requests

    def open(self, request: StageRequest, inputs: StageInputs) -> Code2WavStream:
        voice = request.voice if request.voice is not None else next(iter(self._voices))
        if voice not in self._voices:
            raise UnknownVoice(f"There is no voice {voice!r}; the voices are {', '.join(self._voices)}.")
        if foreign := sorted(set(request.params.given()) - DIFFUSION_PARAMS):
            raise InvalidRequest(f"Parameters {foreign} do not apply to a diffusion stage.")
        params = request.params.merged_over(SPEC.params)
        num_points, guidance, sway = params.num_steps, params.guidance_scale, params.sway_coefficient
        if not 1 <= num_points <= MAX_STEPS:
            raise InvalidRequest(f"num_steps is {num_points}; it must lie in 1..{MAX_STEPS}.")
        if not (guidance >= 0 and math.isfinite(guidance) and math.isfinite(sway)):
            raise InvalidRequest("guidance_scale must be finite and not negative, sway_coefficient finite.")
        stream = Code2WavStream(self, voice, request.effective_seed, params)
        stream.extend(tuple(inputs.token_ids), complete=inputs.complete)
        return stream

    def new_carry(self) -> Carry:
        """Counted as long as it holds anything, so that a leak shows."""
        carry = Carry()
        self._carries.add(carry)
        return carry

    def bytes_of(self, payload: Code2WavPayload) -> tuple[int, int]:
        """Estimates of the memory that a chunk takes in a step and in its last step."""
        dit, vocoder = self.config.dit_config, self.config.bigvgan_config
        frames = len(payload.noise) * dit.block_size
        # The solver keeps the state, its four slopes and a probe; the network its input and some activations.
        network = 2 * dit.hidden_size + DIT_COPIES * dit.hidden_size * max(3, dit.ff_mult)
        step_bytes = 4 * frames * (6 * dit.mel_dim + payload.branches * network)
        if self.policy is not None:  # what is carried from chunk to chunk, once old and once new
            back = len(dit.look_backward_layers)
            kept = EVALUATIONS * payload.intervals * back * payload.branches * dit.block_size
            step_bytes += 2 * 4 * kept * 2 * dit.head_dim * dit.num_attention_heads
        widest, rate, channels = 0, 1, vocoder.upsample_initial_channel
        for factor in vocoder.upsample_rates:
            rate, channels = rate * factor, channels // 2
            widest = max(widest, rate * channels)
        window = payload.context + payload.emit[1] - payload.emit[0] + self.context
        return step_bytes, max(step_bytes, 4 * window * VOCODER_COPIES * widest)

    @torch.inference_mode()
    def add(self, request_id: str, job: DiffusionJob) -> None:
        payload: Code2WavPayload = job.payload
        size = self.config.dit_config.block_size // self.config.dit_config.repeats
        blocks = len(payload.noise)
        padded = payload.token_ids + (0,) * (blocks * size - len(payload.token_ids))
        tokens = self._to_device(torch.tensor(padded))
        voice = self._voices[payload.voice]
        branches = [(voice.speaker, voice.conditioning), (voice.null_speaker, torch.zeros_like(voice.conditioning))]
        fixed = self.dit.condition(tokens, branches[: payload.branches])
        keep = None
        if not payload.last and self.dit.kept_layers:
            shape = self.dit.kept_shape(payload.intervals, payload.branches)
            keep = torch.empty(shape, dtype=self.dit.dtype, device=self.device)
        frames = len(payload.token_ids) * self.config.dit_config.repeats
        state = self._to_device(payload.noise)
        self._requests[request_id] = _Latents(payload, frames, state, fixed, keep)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy from memory that is not pinned would wait for all that the device has been given to do."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def omni_counts(self) -> dict[str, int]:
        carried = sum(carry.left is not None or carry.mel is not None for carry in self._carries)
        return {"latents": len(self._requests), "carried": carried}

    # ------------------------------------------------------------------------------------------------------- stepping

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> dict[str, StepResult]:
        requests = {request_id: self._requests[request_id] for request_id in request_ids}
        states = {request_id: request.state for request_id, request in requests.items()}
        moving = [key for key, request in requests.items() if request.interval < request.payload.intervals]
        if moving:
            states.update(zip(moving, self._integrate(moving), strict=True))
        done = [key for key, request in requests.items() if request.interval >= request.payload.intervals - 1]
        waveforms, carries = self._decode({key: states[key] for key in done})
        # Nothing may fail from here on: a raised error means that no request has advanced.
        for request_id, request in requests.items():
            request.state = states[request_id]
            request.interval += 1
            if request_id in carries:
                request.payload.carry.left, request.payload.carry.mel = carries[request_id]
        return {
            request_id: StepResult({"audio": waveforms[request_id]} if request_id in waveforms else {})
            for request_id in request_ids
        }

    def _integrate(self, request_ids: Sequence[str]) -> list[torch.Tensor]:
        """The states after one interval, each request at its own time."""
        chunks = []
        for request in (self._requests[request_id] for request_id in request_ids):
            payload, interval = request.payload, request.interval
            evaluations = slice(EVALUATIONS * interval, EVALUATIONS * (interval + 1))
            left = payload.carry.left
            chunks.append(
                DitChunk(
                    state=request.state,
                    fixed=request.fixed,
                    frames=request.frames,
                    guidance=payload.guidance_scale,
                    times=payload.times[interval : interval + 2],
                    left=None if left is None else left[evaluations],
                    keep=None if request.keep is None else request.keep[evaluations],
                    keep_block=payload.blocks - 1,
                )
            )
        return self.dit.advance(chunks)

    # -------------------------------------------------------------------------------------------------------- decoding

    def _decode(
        self, states: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]]:
        """Waveforms [samples] on the device, where there is something to send, and what each request carries on.

        Windows of equal length share a batch; padding would change their edges.
        """
        windows: dict[str, torch.Tensor] = {}
        carries: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        by_length: dict[int, list[str]] = defaultdict(list)
        for request_id, state in states.items():
            request = self._requests[request_id]
            payload = request.payload
            new = state.flatten(0, 1)[: request.frames]
            mel = new if payload.carry.mel is None else torch.cat([payload.carry.mel, new])
            final = len(mel) - max(0, request.frames - payload.blocks * state.shape[1])
            if payload.last:
                carries[request_id] = (None, None)
            else:
                # A copy: a view would keep the whole batch's states alive.
                kept = mel[payload.keep_from - (payload.emit[0] - payload.context) : final].clone()
                carries[request_id] = (request.keep, kept)
            if payload.emit[1] > payload.emit[0]:
                windows[request_id] = mel
                by_length[len(mel)].append(request_id)
        waveforms: dict[str, torch.Tensor] = {}
        rate = self.vocoder.samples_per_frame
        for request_ids in by_length.values():
            mel = torch.stack([windows[request_id] for request_id in request_ids])
            for request_id, samples in zip(request_ids, self._vocode(mel.transpose(1, 2)), strict=True):
                payload = self._requests[request_id].payload
                sent = payload.emit[1] - payload.emit[0]
                waveforms[request_id] = samples[payload.context * rate : (payload.context + sent) * rate]
        return waveforms, carries

    def _vocode(self, mel: torch.Tensor) -> torch.Tensor:
        """BigVGAN on `mel` [requests, mel_dim, frames] to [requests, samples], left on the device."""
        return self.vocoder(mel)


SPEC = ModelSpec(
    kind="diffusion",
    hf_overrides=placeholder_overrides("token2wav_config", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Chunks at a time. More make the step longer that first chunks and the thinker wait for (docs/benchmarks.md).
    engine={"max_num_seqs": 16, "scheduling_policy": "priority"},
    required={
        "max_model_len": MAX_STEPS + 1,
        "max_num_batched_tokens": MAX_STEPS + 1,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    },
    params=StageParams(num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0),
    runner="omni_actors.engine.models.qwen2_5_omni.code2wav.Qwen2_5OmniCode2Wav",
)
