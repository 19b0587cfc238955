"""Qwen2.5-Omni's vocoder (token2wav: a diffusion transformer and BigVGAN) for requests of any mix of lengths.

The modules come from transformers; what is ours is how a batch runs through the DiT. Its attention is local: a frame
sees the frames of its own block (24 frames), in a few layers also the block before or after. So every request is cut
into blocks, the last one padded, and the blocks of all requests and of both guidance branches are stacked to
[blocks, frames per block, width]. Attention runs per block over the keys of its window: the cost is linear in the
length, a request pays for at most 23 frames of padding whatever else is in the batch, and nothing can leak between
requests. One step is one interval of the Runge-Kutta solver (four evaluations); the last one also decodes the mel
frames.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniToken2WavModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import apply_rotary_pos_emb, deinterleave_head_dim
from transformers.utils import cached_file

from omni_actors.engine.diffusion_runner import DiffusionJob, DiffusionModelRunner, StepResult
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.voices import load_voices
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong, StartupError, UnknownVoice
from omni_actors.messages import DIFFUSION_PARAMS, StageParams
from omni_actors.stage.interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniToken2WavConfig

SAMPLE_RATE = 24_000
MAX_STEPS = 1000
WEIGHT_PREFIX = "token2wav."
# Below this guidance scale transformers skips the unconditional branch.
MIN_GUIDANCE = 1e-5
# Copies of the widest activation that live at a time, for the byte estimates: 30 % and 15 % above what an H200 used.
DIT_COPIES = 4
VOCODER_COPIES = 12


@dataclass(frozen=True)
class Code2WavPayload:
    """A validated vocoder request. `times` f32 [steps + 1] are the solver's points in time, on the host."""

    token_ids: tuple[int, ...]
    voice: str
    seed: int
    times: torch.Tensor
    guidance_scale: float

    @property
    def guided(self) -> bool:
        return self.guidance_scale >= MIN_GUIDANCE


@dataclass(frozen=True)
class _Voice:
    """A speaker on the device: f32 `conditioning` [enc_emb_dim], `speaker` and `null_speaker` [enc_dim]."""

    conditioning: torch.Tensor
    speaker: torch.Tensor
    null_speaker: torch.Tensor


@dataclass
class _Latents:
    """A request in progress. `state` f32 [blocks, frames per block, mel_dim], frames past `frames` are padding.

    `fixed` [branches, blocks, frames per block, columns] holds the inputs of the DiT that never change for a request.
    """

    payload: Code2WavPayload
    frames: int
    state: torch.Tensor
    fixed: torch.Tensor
    interval: int = 0

    @property
    def blocks(self) -> int:
        return self.state.shape[0]


@dataclass(frozen=True)
class _Window:
    """The keys that a block sees: `blocks` i64 [blocks, n], `mask` bool [blocks, 1, 1, n * frames per block]."""

    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Batch:
    """How one set of requests lies in a batch; kept while the set stays the same.

    Blocks are ordered: conditional branch of every request, then unconditional branch of every guided request.
    `source` i64 [blocks] is the conditional block with the same latents, `owner` i64 [blocks] the request's index,
    `unguided` the number of conditional blocks, `scale` f32 [unconditional blocks, 1, 1] their guidance scale.
    """

    request_ids: tuple[str, ...]
    source: torch.Tensor
    owner: torch.Tensor
    conditional: int
    scale: torch.Tensor
    fixed: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    windows: Mapping[tuple[int, int], _Window]


def solver_times(num_steps: int, sway_coefficient: float) -> torch.Tensor:
    """The solver's points in time, f32 [max(num_steps, 2)] from 0 to 1, as transformers computes them.

    `num_steps` counts points, so there are `num_steps - 1` intervals. One point means no interval at all: the reference
    then decodes the initial noise, and so do we.
    """
    times = torch.linspace(0, 1, num_steps, dtype=torch.float32)
    times += sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    return times


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
    """Codec tokens to waveform, f32 [samples] at 24 kHz, in float32 as the checkpoint requires."""

    def __init__(self, vllm_config, device: torch.device) -> None:  # noqa: ANN001 - VllmConfig
        super().__init__(vllm_config, device)
        self.model_name: str = vllm_config.model_config.model
        config: Qwen2_5OmniToken2WavConfig = Qwen2_5OmniConfig.from_pretrained(self.model_name).token2wav_config
        self.config = config
        self.max_tokens = config.dit_config.max_position_embeddings // config.dit_config.repeats
        self._requests: dict[str, _Latents] = {}
        self._voices: dict[str, _Voice] = {}
        self._batch: _Batch | None = None

    # ---------------------------------------------------------------------------------------------------- life cycle

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            voices=tuple(self._voices), sample_rate=SAMPLE_RATE, max_input_tokens=self.max_tokens
        )

    def load(self, *, dummy: bool) -> None:
        with torch.device(self.device):
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
        self.dit, self.vocoder = model.code2wav_dit_model, model.code2wav_bigvgan_model
        self._load_voices()

    @torch.inference_mode()
    def _load_voices(self) -> None:
        encoder = self.dit.input_embed.spk_encoder
        for name, entry in load_voices(self.model_name).items():
            mel = entry["ref_mel"].to(self.device, torch.float32)
            # The unconditional branch encodes a silent reference of the same length. Both depend on the voice alone.
            speaker, null_speaker = encoder(torch.cat([mel, torch.zeros_like(mel)]))
            conditioning = entry["cond"].to(self.device, torch.float32).reshape(-1)
            self._voices[name] = _Voice(conditioning, speaker, null_speaker)

    def warm_up(self) -> None:
        request_id = "_warm_up"
        voice = next(iter(self._voices))
        payload = Code2WavPayload((0,) * 2, voice, 0, solver_times(2, -1.0), 0.5)
        self.add(request_id, DiffusionJob(payload, num_steps=1))
        self.step([request_id])
        self.remove(request_id)

    # ------------------------------------------------------------------------------------------------------ requests

    def prepare(self, request: StageRequest, inputs: StageInputs) -> DiffusionJob:
        token_ids = tuple(inputs.token_ids)
        if not token_ids:
            raise InvalidRequest("The vocoder got no codec token.", hint="Let the talker produce at least one token.")
        if len(token_ids) > self.max_tokens:
            raise PromptTooLong(f"{len(token_ids)} codec tokens exceed the vocoder's maximum of {self.max_tokens}.")
        rows = self.config.dit_config.num_embeds + 1
        if min(token_ids) < 0 or max(token_ids) >= rows:
            wrong = next(token for token in token_ids if not 0 <= token < rows)
            raise InvalidPayload(f"Codec token {wrong} is outside 0..{rows - 1}.")
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
        payload = Code2WavPayload(token_ids, voice, request.effective_seed, solver_times(num_points, sway), guidance)
        step_bytes, final_bytes = self._bytes(len(token_ids), payload.guided)
        return DiffusionJob(payload, max(1, num_points - 1), step_bytes, final_bytes, len(token_ids))

    def _bytes(self, tokens: int, guided: bool) -> tuple[int, int]:
        """Estimates of the memory that a request takes in a step and in its last step."""
        dit, vocoder = self.config.dit_config, self.config.bigvgan_config
        frames = self._blocks(tokens * dit.repeats) * dit.block_size
        # The solver keeps the state, its four slopes and a probe; the network its inputs and some activations.
        inputs = dit.mel_dim + dit.enc_dim + dit.enc_emb_dim + dit.emb_dim
        network = 2 * inputs + DIT_COPIES * dit.hidden_size * max(3, dit.ff_mult)
        step_bytes = 4 * frames * (6 * dit.mel_dim + (2 if guided else 1) * network)
        widest, rate, channels = 0, 1, vocoder.upsample_initial_channel
        for factor in vocoder.upsample_rates:
            rate, channels = rate * factor, channels // 2
            widest = max(widest, rate * channels)
        return step_bytes, max(step_bytes, 4 * frames * VOCODER_COPIES * widest)

    def _blocks(self, frames: int) -> int:
        return -(-frames // self.config.dit_config.block_size)

    @torch.inference_mode()
    def add(self, request_id: str, job: DiffusionJob) -> None:
        payload: Code2WavPayload = job.payload
        dit, size = self.dit, self.dit.block_size
        frames = len(payload.token_ids) * dit.repeats
        blocks = self._blocks(frames)
        generator = torch.Generator().manual_seed(payload.seed)
        noise = torch.randn([1, frames, dit.mel_dim], generator=generator, dtype=torch.float32)
        state = F.pad(noise[0], (0, 0, 0, blocks * size - frames)).to(self.device).view(blocks, size, dit.mel_dim)

        voice = self._voices[payload.voice]
        codes = torch.tensor([payload.token_ids], device=self.device)
        branches = [(voice.speaker, dit.text_embed(codes)[0], voice.conditioning)]
        if payload.guided:
            null_codes = dit.text_embed(codes, drop_code=True)[0]
            branches.append((voice.null_speaker, null_codes, torch.zeros_like(voice.conditioning)))
        fixed = torch.stack(
            [torch.cat([a.expand(frames, -1), codes, b.expand(frames, -1)], dim=-1) for a, codes, b in branches]
        )
        fixed = F.pad(fixed, (0, 0, 0, blocks * size - frames)).view(len(branches), blocks, size, -1)
        self._requests[request_id] = _Latents(payload, frames, state, fixed)

    def remove(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None and self._batch is not None:
            # The batch holds copies of its requests' inputs; let them go with the first of them.
            self._batch = None if request_id in self._batch.request_ids else self._batch

    def omni_counts(self) -> dict[str, int]:
        return {"latents": len(self._requests), "batches": int(self._batch is not None)}

    # ------------------------------------------------------------------------------------------------------- stepping

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> dict[str, StepResult]:
        requests = {request_id: self._requests[request_id] for request_id in request_ids}
        states = {request_id: request.state for request_id, request in requests.items()}
        moving = [key for key, request in requests.items() if request.interval < len(request.payload.times) - 1]
        if moving:
            states.update(self._integrate(moving))
        done = [key for key, request in requests.items() if request.interval >= len(request.payload.times) - 2]
        waveforms = self._decode({key: states[key] for key in done})
        # Nothing may fail from here on: a raised error means that no request has advanced.
        for request_id, request in requests.items():
            request.state = states[request_id]
            request.interval += 1
        return {
            request_id: StepResult({"audio": waveforms[request_id]} if request_id in waveforms else {})
            for request_id in request_ids
        }

    def _integrate(self, request_ids: Sequence[str]) -> dict[str, torch.Tensor]:
        """One interval of the 3/8-rule Runge-Kutta solver for all requests, each at its own time; the new states."""
        requests = [self._requests[request_id] for request_id in request_ids]
        batch = self._batch
        if batch is None or batch.request_ids != tuple(request_ids):
            batch = self._batch = self._arrange(request_ids)
        start = torch.stack([request.payload.times[request.interval] for request in requests])
        end = torch.stack([request.payload.times[request.interval + 1] for request in requests])
        width, third, two_thirds = end - start, 1 / 3, 2 / 3
        points = torch.stack([start, start + width * third, start + width * two_thirds, end, width])
        points = points.to(self.device, non_blocking=True)
        step = points[4][batch.owner[: batch.conditional]].view(-1, 1, 1)

        state = torch.cat([request.state for request in requests])
        k1 = self._evaluate(batch, points[0], state)
        k2 = self._evaluate(batch, points[1], state + step * k1 * third)
        k3 = self._evaluate(batch, points[2], state + step * (k2 - k1 * third))
        k4 = self._evaluate(batch, points[3], state + step * (k1 - k2 + k3))
        state = state + (k1 + 3 * (k2 + k3) + k4) * step / 8
        return dict(zip(request_ids, state.split([request.blocks for request in requests]), strict=True))

    def _arrange(self, request_ids: Sequence[str]) -> _Batch:
        requests = [self._requests[request_id] for request_id in request_ids]
        size = self.dit.block_size
        offsets, source, owner, scale = [0], [], [], []
        for request in requests:
            offsets.append(offsets[-1] + request.blocks)
        conditional = offsets[-1]
        first, count, valid = [], [], []  # of each block: first block and number of blocks of its sequence, real frames
        for branch in (0, 1):
            for index, request in enumerate(requests):
                if branch and not request.payload.guided:
                    continue
                begin = len(source)
                source += range(offsets[index], offsets[index + 1])
                owner += [index] * request.blocks
                first += [begin] * request.blocks
                count += [request.blocks] * request.blocks
                valid += [min(size, request.frames - block * size) for block in range(request.blocks)]
                scale += [request.payload.guidance_scale] * request.blocks if branch else []

        first_block, block_count = torch.tensor(first), torch.tensor(count)
        block = torch.arange(len(source))
        real = torch.arange(size) < torch.tensor(valid)[:, None]  # [blocks, frames per block]
        windows = {}
        for layer in self.dit.transformer_blocks:
            reach = (layer.look_backward_block, layer.look_ahead_block)
            if reach in windows:
                continue
            keys = block[:, None] + torch.arange(-reach[0], reach[1] + 1)  # [blocks, window]
            inside = (keys >= first_block[:, None]) & (keys < (first_block + block_count)[:, None])
            keys = torch.where(inside, keys, block[:, None])
            mask = (real[keys] & inside[:, :, None]).view(len(source), 1, 1, -1)
            windows[reach] = _Window(keys.to(self.device), mask.to(self.device))

        position = ((block - first_block)[:, None] * size + torch.arange(size)).to(self.device)
        fixed = [request.fixed[0] for request in requests]
        fixed += [request.fixed[1] for request in requests if request.payload.guided]
        return _Batch(
            request_ids=tuple(request_ids),
            source=torch.tensor(source).to(self.device),
            owner=torch.tensor(owner).to(self.device),
            conditional=conditional,
            scale=torch.tensor(scale, dtype=torch.float32).view(-1, 1, 1).to(self.device),
            fixed=torch.cat(fixed),
            rotary=self.dit.rotary_embed(fixed[0], position),
            windows=windows,
        )

    def _evaluate(self, batch: _Batch, times: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The guided slope at `state` [conditional blocks, frames per block, mel_dim]; `times` [requests]."""
        dit = self.dit
        time_embedding = dit.time_embed(times)[batch.owner]
        hidden = dit.input_embed.proj(torch.cat([state[batch.source], batch.fixed], dim=-1))
        for layer in dit.transformer_blocks:
            window = batch.windows[layer.look_backward_block, layer.look_ahead_block]
            normed, gate_attention, shift, scale, gate = layer.attn_norm(hidden, emb=time_embedding)
            hidden = hidden + gate_attention[:, None] * self._attend(layer.attn, normed, batch.rotary, window)
            normed = layer.ff_norm(hidden) * (1 + scale[:, None]) + shift[:, None]
            hidden = hidden + gate[:, None] * layer.ff(normed)
        slope = dit.proj_out(dit.norm_out(hidden, time_embedding))
        guided, null = slope[: batch.conditional], slope[batch.conditional :]
        if len(null):
            rows = batch.source[batch.conditional :]
            guided = guided.index_add(0, rows, (guided[rows] - null) * batch.scale)
        return guided

    @staticmethod
    def _attend(
        attention: torch.nn.Module, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], window: _Window
    ) -> torch.Tensor:
        """Attention of each block of `hidden` [blocks, frames per block, width] over the blocks of its window."""
        blocks, size, _ = hidden.shape

        def heads(projection: torch.nn.Module) -> torch.Tensor:
            return projection(hidden).view(blocks, size, attention.heads, -1).transpose(1, 2)

        query, key, value = heads(attention.to_q), heads(attention.to_k), heads(attention.to_v)
        # The published model was trained with rotary positions on its first head only, in the interleaved layout.
        query[:, :1], key[:, :1] = apply_rotary_pos_emb(
            deinterleave_head_dim(query[:, :1]), deinterleave_head_dim(key[:, :1]), *rotary
        )
        if window.blocks.shape[1] > 1:
            key, value = (
                tensor[window.blocks].transpose(1, 2).flatten(2, 3)  # [blocks, heads, window * size, head_dim]
                for tensor in (key, value)
            )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=window.mask)
        return attention.to_out[0](mixed.transpose(1, 2).reshape(blocks, size, -1))

    # -------------------------------------------------------------------------------------------------------- decoding

    def _decode(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Waveforms [samples] on the device. Requests of equal length share a batch; padding would change the edges."""
        by_length: dict[int, list[str]] = defaultdict(list)
        for request_id in states:
            by_length[self._requests[request_id].frames].append(request_id)
        waveforms = {}
        for frames, request_ids in by_length.items():
            mel = torch.stack([states[request_id].flatten(0, 1)[:frames] for request_id in request_ids])
            waveforms.update(zip(request_ids, self._vocode(mel.transpose(1, 2)), strict=True))
        return waveforms

    def _vocode(self, mel: torch.Tensor) -> torch.Tensor:
        """BigVGAN on `mel` [requests, mel_dim, frames] to [requests, samples], left on the device.

        The module's own forward copies to the host and drops the batch dimension, so its parts are called here.
        """
        vocoder = self.vocoder
        kernels = vocoder.num_residual_blocks
        hidden = vocoder.conv_pre(vocoder.process_mel_spectrogram(mel))
        for index, (upsample,) in enumerate(vocoder.ups):
            hidden = upsample(hidden)
            branches = vocoder.resblocks[index * kernels : (index + 1) * kernels]
            hidden = sum(branch(hidden) for branch in branches) / kernels
        hidden = vocoder.conv_post(vocoder.activation_post(hidden))
        return hidden.clamp(-1.0, 1.0)[:, 0]


SPEC = ModelSpec(
    kind="diffusion",
    hf_overrides=placeholder_overrides("token2wav_config", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    engine={"max_num_seqs": 32},
    required={
        "max_model_len": MAX_STEPS + 1,
        "max_num_batched_tokens": MAX_STEPS + 1,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    },
    params=StageParams(num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0),
    runner="omni_actors.engine.models.qwen2_5_omni_code2wav.Qwen2_5OmniCode2Wav",
)
