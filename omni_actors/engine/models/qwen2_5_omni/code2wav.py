"""Qwen2.5-Omni's vocoder (token2wav: a diffusion transformer and BigVGAN), for requests of any mix of lengths.

An utterance is decoded in chunks while the talker is still speaking (`stream.py` cuts it). A chunk continues the one
before it: the transformer reads the keys and values that were kept of the block to its left (`dit.py`), BigVGAN the mel
frames that its receptive field reaches back to. The result differs from the whole decode only in that the look-ahead
blocks do not know what follows them.

One step is one interval of the solver for all chunks in progress; the last one also decodes the mel frames.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniToken2WavModel

from omni_actors.engine.models.chunks import WARM_UP, ChunkPolicy, VocoderRunner
from omni_actors.engine.models.code_talker import chosen_voice
from omni_actors.engine.models.diffusers_layout import fill, read_tensors, same_everywhere
from omni_actors.engine.models.placeholder import vocoder_spec
from omni_actors.engine.models.qwen2_5_omni.bigvgan import FusedVocoder, GraphedVocoder, Vocoder
from omni_actors.engine.models.qwen2_5_omni.dit import SOLVERS, Dit, DitChunk, graph_rows, solver_times
from omni_actors.engine.models.qwen2_5_omni.stream import Carry, Code2WavPayload, Code2WavStream, Geometry
from omni_actors.engine.models.qwen2_5_omni.talker import load_voices
from omni_actors.engine.rows import moved
from omni_actors.engine.workers.diffusion import DiffusionJob, StepResult
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import DIFFUSION_PARAMS, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAMPLE_RATE = 24_000  # Hz
MAX_STEPS = 1000
WEIGHT_PREFIX = "token2wav."
WHOLE_ROWS = 544  # of a step that decodes whole utterances, for the graphs; larger steps run without one


def most_rows(chunks: int, policy: ChunkPolicy | None) -> int:
    """Rows of the largest step of n chunks: their blocks, with the look-ahead, in both guidance branches."""
    return WHOLE_ROWS if policy is None else 2 * chunks * (policy.largest + policy.look_ahead)


@dataclass
class _Latents:
    """A chunk in progress."""

    payload: Code2WavPayload
    chunk: DitChunk


class Qwen2_5OmniCode2Wav(VocoderRunner):
    """Codec tokens to waveform, f32 [samples] at 24 kHz."""

    chunks = ChunkPolicy(first=1, largest=8, look_ahead=1)
    auto_precision: ClassVar[Mapping[str, str]] = {"cuda": "bf16", "cpu": "float32"}  # docs/benchmarks.md
    solvers = tuple(SOLVERS)

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.config = Qwen2_5OmniConfig.from_pretrained(self.model_name).token2wav_config
        self._solver = SOLVERS[self.solver]
        self.geometry = Geometry(self.config, self.policy, self.dtype.itemsize, self._solver.evaluations)
        # What each has in both branches: f32 [enc_dim] of the speaker and the conditioning [enc_emb_dim].
        self._voices: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    # -- life cycle

    @property
    def facts(self) -> EngineFacts:
        """Voices and sample rate, and the longest utterance in codec tokens."""
        return EngineFacts(
            voices=tuple(self._voices), sample_rate=SAMPLE_RATE, max_input_tokens=self.geometry.max_tokens
        )

    def load(self, *, dummy: bool) -> None:
        """Load both networks and encode the voices.

        Raises:
            StartupError: weights are missing, or do not fit the configuration.
            ConfigError: the checkpoint's voices cannot be read.
        """
        with same_everywhere(self.device):
            model = Qwen2_5OmniToken2WavModel._from_config(self.config).float().eval()
        if not dummy:
            fill(model, read_tensors(self.model_name, WEIGHT_PREFIX), f"the vocoder in {self.model_name!r}")
        model.requires_grad_(False)
        dit = model.code2wav_dit_model
        self.dit = Dit(
            dit,
            dtype=self.dtype,
            precise=self.precision == "float32",
            max_requests=self.max_requests,
            solver=self._solver,
        )
        bigvgan = model.code2wav_bigvgan_model
        if self.device.type == "cuda" and self.precision != "float32":
            dtype = torch.float16 if self.precision == "bf16" else torch.float32
            self.vocoder: Vocoder | GraphedVocoder = FusedVocoder(bigvgan, dtype)
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
            self._voices[name] = [(speaker, conditioning), (null_speaker, torch.zeros_like(conditioning))]

    def warm_up(self) -> None:
        """Run every shape of window that the policy makes, so that no request waits while a kernel is chosen."""
        if self.device.type == "cuda":
            self.dit.capture(graph_rows(most_rows(self.max_requests, self.policy)))
        lengths: set[int] = set()
        request = StageRequest(WARM_UP, StageParams(num_steps=2), seed=0)
        blocks = 3 if self.policy is None else 3 * self.policy.largest
        stream = self.open(request, StageInputs(token_ids=[0] * (blocks * self.geometry.frames_per_block // 2)))
        for job in self.rehearse(stream):
            if not job.payload.last:  # the last window of an utterance can have any length
                kept = job.payload.carry.mel
                lengths.add(self.held[WARM_UP].chunk.frames + (0 if kept is None else len(kept)))
        if isinstance(self.vocoder, FusedVocoder):
            self.vocoder = GraphedVocoder(self.vocoder, lengths, self.geometry.mel_dim, self.device)

    # -- requests

    def open(self, request: StageRequest, inputs: StageInputs) -> Code2WavStream:
        """Check voice, parameters and first tokens of a request.

        Raises:
            OmniError: one of them cannot be decoded.
        """
        voice = chosen_voice(request.voice, self._voices)
        if foreign := sorted(set(request.params.given()) - DIFFUSION_PARAMS):
            raise InvalidRequest(f"Parameters {foreign} do not apply to a diffusion stage.")
        given = request.params.merged_over(SPEC.params).given()
        num_steps, guidance, sway = (given[name] for name in ("num_steps", "guidance_scale", "sway_coefficient"))
        if not 1 <= num_steps <= MAX_STEPS:
            raise InvalidRequest(f"num_steps is {num_steps}; it must lie in 1..{MAX_STEPS}.")
        if not (guidance >= 0 and math.isfinite(guidance) and math.isfinite(sway)):
            raise InvalidRequest("guidance_scale must be finite and not negative, sway_coefficient finite.")
        carry = Carry()
        self._carries.add(carry)
        times = tuple(solver_times(num_steps, sway).tolist())
        stream = Code2WavStream(self.geometry, carry, voice, request.effective_seed, times, guidance)
        stream.extend(tuple(inputs.token_ids), complete=inputs.complete)
        return stream

    @torch.inference_mode()
    def take(self, job: DiffusionJob) -> _Latents:
        """Bring a chunk's noise and conditions to the device."""
        payload: Code2WavPayload = job.payload
        padding = len(payload.noise) * self.geometry.tokens_per_block - len(payload.token_ids)
        padded = payload.token_ids + (0,) * padding
        tokens = moved(torch.tensor(padded), self.device)
        fixed = self.dit.condition(tokens, self._voices[payload.voice][: payload.branches])
        keep = None
        if not payload.last and self.dit.kept_layers:
            shape = self.dit.kept_shape(payload.intervals, payload.branches)
            keep = torch.empty(shape, dtype=self.dit.dtype, device=self.device)
        chunk = DitChunk(
            state=moved(payload.noise, self.device, copy=True),
            fixed=fixed,
            frames=len(payload.token_ids) * self.geometry.frames_per_token,
            guidance=payload.guidance_scale,
            times=payload.times,
            left=payload.carry.left,
            keep=keep,
            keep_block=payload.blocks - 1,
        )
        return _Latents(payload, chunk)

    def omni_counts(self) -> dict[str, int]:
        """`allocated_bytes` are those of the memory behind all that is held, shared memory counted once."""
        carried = [[carry.left, carry.mel] for carry in self._carries]
        held = [[one.chunk.state, one.chunk.fixed, one.chunk.keep] for one in self.held.values()]
        tensors = [tensor for group in carried + held for tensor in group if tensor is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return {
            "latents": len(self.held),
            "carried": sum(any(tensor is not None for tensor in group) for group in carried),
            "allocated_bytes": sum(storages.values()),
        }

    # -- stepping

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> dict[str, StepResult]:
        """Advance these chunks by one interval; those at their last become waveforms f32 [samples]."""
        requests = {request_id: self.held[request_id] for request_id in request_ids}
        states = {request_id: request.chunk.state for request_id, request in requests.items()}
        moving = [key for key, request in requests.items() if request.chunk.interval < request.payload.intervals]
        if moving:
            states.update(zip(moving, self.integrate(moving), strict=True))
        done = [key for key, request in requests.items() if request.chunk.interval >= request.payload.intervals - 1]
        waveforms, carries = self._decode({key: states[key] for key in done})
        # Nothing may fail from here on: a raised error means that no request has advanced.
        if moving:  # a copy: each of the new states is a view that would keep the whole batch's alive
            torch._foreach_copy_([requests[key].chunk.state for key in moving], [states[key] for key in moving])
        for request_id, request in requests.items():
            request.chunk.interval += 1
            if request_id in carries:
                request.payload.carry.left, request.payload.carry.mel = carries[request_id]
        return {
            request_id: StepResult({"audio": waveforms[request_id]} if request_id in waveforms else {})
            for request_id in request_ids
        }

    def integrate(self, request_ids: Sequence[str]) -> list[torch.Tensor]:
        """The requests' states [blocks, frames, mel_dim] after one interval, each at its own time."""
        return self.dit.advance([self.held[request_id].chunk for request_id in request_ids])

    # -- decoding

    def _decode(
        self, states: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]]:
        """Decode finished chunks: waveforms [samples] on the device, if there is any to send, and the next `Carry`.

        Windows of equal length share a batch; padding would change their edges.
        """
        windows: dict[str, torch.Tensor] = {}
        carries: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        by_length: dict[int, list[str]] = defaultdict(list)
        for request_id, state in states.items():
            payload, chunk = self.held[request_id].payload, self.held[request_id].chunk
            new = state.flatten(0, 1)[: chunk.frames]
            mel = new if payload.carry.mel is None else torch.cat([payload.carry.mel, new])
            final = len(mel) - max(0, chunk.frames - payload.blocks * state.shape[1])
            if payload.last:
                carries[request_id] = (None, None)
            else:
                # A copy: a view would keep the whole batch's states alive.
                kept = mel[payload.keep_from - (payload.emit[0] - payload.context) : final].clone()
                carries[request_id] = (chunk.keep, kept)
            if payload.emit[1] > payload.emit[0]:
                windows[request_id] = mel
                by_length[len(mel)].append(request_id)
        waveforms: dict[str, torch.Tensor] = {}
        rate = self.vocoder.samples_per_frame
        for request_ids in by_length.values():
            mel = torch.stack([windows[request_id] for request_id in request_ids])
            for request_id, samples in zip(request_ids, self.vocode(mel.transpose(1, 2)), strict=True):
                payload = self.held[request_id].payload
                sent = payload.emit[1] - payload.emit[0]
                waveforms[request_id] = samples[payload.context * rate : (payload.context + sent) * rate]
        return waveforms, carries

    def vocode(self, mel: torch.Tensor) -> torch.Tensor:
        """BigVGAN on `mel` [requests, mel_dim, frames] to [requests, samples], left on the device."""
        return self.vocoder(mel)


# 32 chunks at a time. More of them make the steps longer that first chunks and the thinker wait for, and the batches
# larger, which take less time for each chunk (docs/benchmarks.md).
PARAMS = StageParams(num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0)
SPEC = vocoder_spec(Qwen2_5OmniCode2Wav, "token2wav_config", MAX_STEPS, 32, params=PARAMS)
