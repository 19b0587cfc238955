"""Serves a codec decoder: each chunk is one step, and all chunks of a step share batches."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from omni_actors.engine.diffusion_runner import DiffusionJob, DiffusionModelRunner, StepResult
from omni_actors.engine.models.chunks import ChunkPolicy, DecodeOptions
from omni_actors.engine.models.codec_decoder.batches import BatchedDecoder
from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.codec_decoder.stream import CodecChunk, CodecStream, Cutting, DecoderCarry
from omni_actors.engine.worker_base import omni_options
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.stage import UNHEARD
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_STEPS = 1023  # far more than the one of a request: vLLM takes no more requests at a time than it has tokens
DUMMY_SEED = 0
AUTO_PRECISION = {"cuda": "tf32", "cpu": "float32"}
CHUNKS = ChunkPolicy(first=1, largest=8, look_ahead=0)
# What vLLM's configuration has to say for a decoder whose requests take one step.
REQUIRED = {
    "max_model_len": MAX_STEPS + 1,
    "max_num_batched_tokens": MAX_STEPS + 1,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}


class CodecRunner(DiffusionModelRunner):
    """Frames of codes to a waveform, f32 [samples]. A model's own class makes the decoder and reads its weights."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.model_name: str = vllm_config.model_config.model
        given = omni_options(vllm_config).get("decode") or {}
        if given.get("look_ahead_blocks"):
            raise ConfigError("decode.look_ahead_blocks: this decoder needs no look-ahead; remove it or set it to 0.")
        options = DecodeOptions.from_mapping(given, CHUNKS)
        self.precision = options.precision if options.precision != "auto" else AUTO_PRECISION[device.type]
        self._policy = options.policy
        self._max_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._requests: dict[str, CodecChunk] = {}
        self._carries: weakref.WeakSet[DecoderCarry] = weakref.WeakSet()  # counted, so that a leak shows

    # -- the model's own

    @abstractmethod
    def make_decoder(self) -> CodecDecoder:
        """The decoder with random weights, on the CPU. Raises `StartupError` if the checkpoint describes none."""

    @abstractmethod
    def read_weights(self) -> Mapping[str, torch.Tensor]:
        """The decoder's weights by their names in it."""

    # -- life cycle

    @property
    def facts(self) -> EngineFacts:
        """Sample rate, and the longest utterance in codes. Voices are the talker's."""
        sizes = self.decoder.sizes
        longest = sizes.max_position_embeddings * sizes.num_quantizers
        return EngineFacts(sample_rate=sizes.sample_rate, max_input_tokens=longest, parameters=())

    def load(self, *, dummy: bool) -> None:
        """Make the decoder and read its weights.

        Raises:
            StartupError: weights are missing, or do not fit the configuration.
        """
        # Dummy weights are the same in every process: a restarted stage goes on with the same sound.
        with torch.random.fork_rng():
            torch.manual_seed(DUMMY_SEED)
            self.decoder = self.make_decoder().eval()
        if not dummy:
            self._load(self.read_weights())
        self.decoder.requires_grad_(False)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        self.decoder.to(self.device, dtype)
        if self.device.type == "cuda":
            # The worker forbids TF32 for every model; this one, alone in its process, may allow it.
            torch.backends.cudnn.allow_tf32 = self.precision != "float32"
            torch.backends.cuda.matmul.allow_tf32 = self.precision != "float32"
        self._batches = BatchedDecoder(self.decoder, self.device, self._max_requests)
        self.cutting = Cutting(self.decoder.sizes, self._policy, self._batches.state_bytes, dtype.itemsize)

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = self.decoder.state_dict()
        missing = sorted(own.keys() - weights.keys())
        unexpected = sorted(weights.keys() - own.keys())
        misshapen = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
        if missing or unexpected or misshapen:
            raise StartupError(
                f"The codec decoder's weights in {self.model_name!r} do not fit its config: missing {missing[:3]}, "
                f"unexpected {unexpected[:3]}, of another shape {sorted(misshapen)[:3]} ({len(missing)}, "
                f"{len(unexpected)} and {len(misshapen)} in all).",
                hint="Check that config.json and the safetensors files belong together.",
            )
        self.decoder.load_state_dict(weights)

    def warm_up(self) -> None:
        """Capture the graphs and decode an utterance, so that no request waits while a kernel is chosen."""
        if self.device.type == "cuda" and self._policy is not None:
            self._batches.capture(self._policy.first, self.cutting.lengths())
        frames = 4 * self._policy.largest if self._policy is not None else 1
        inputs = StageInputs(token_ids=[0] * (frames * self.decoder.sizes.num_quantizers))
        stream = self.open(StageRequest("_warm_up", StageParams(), seed=0), inputs)
        while (job := stream.next_job()) is not None:
            self.add("_warm_up", job)
            self.step(["_warm_up"])
            self.remove("_warm_up")
        stream.close()

    # -- requests

    def open(self, request: StageRequest, inputs: StageInputs) -> CodecStream:
        """Check the parameters and first frames of a request.

        Raises:
            OmniError: one of them cannot be decoded.
        """
        # The seed is accepted and unused: decoding is deterministic.
        if foreign := sorted(set(request.params.given()) - {"seed"}):
            raise InvalidRequest(
                f"Parameters {foreign} do not apply to a codec decoder.", hint="It takes none; leave them out."
            )
        carry = DecoderCarry()
        self._carries.add(carry)
        stream = CodecStream(self.cutting, carry, self._unheard(inputs))
        stream.extend(tuple(inputs.token_ids), complete=inputs.complete)
        return stream

    def _unheard(self, inputs: StageInputs) -> int:
        unheard = inputs.scalars.get(UNHEARD, 0)
        width = self.decoder.sizes.num_quantizers
        if isinstance(unheard, bool) or not isinstance(unheard, int) or unheard < 0 or unheard % width:
            raise InvalidPayload(f"{UNHEARD}: must be the number of codes in whole frames of {width}; got {unheard!r}.")
        return unheard

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Take a chunk; it comes to the device with its step."""
        self._requests[request_id] = job.payload

    def remove(self, request_id: str) -> None:
        """Forget a chunk. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def omni_counts(self) -> dict[str, int]:
        """Chunks that have not ended, and the states that are held with their bytes."""
        held = [carry.state for carry in self._carries if carry.state is not None]
        return {
            "chunks": len(self._requests),
            "carried": len(held),
            "allocated_bytes": sum(state.untyped_storage().nbytes() for state in held),
        }

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> dict[str, StepResult]:
        """Decode these chunks to waveforms f32 [samples]."""
        alike: dict[tuple[bool, int], list[str]] = defaultdict(list)
        for request_id in request_ids:
            chunk = self._requests[request_id]
            if chunk.frames:
                alike[chunk.position == 0, chunk.frames].append(request_id)
        waveforms: dict[str, torch.Tensor] = {}
        states: dict[str, torch.Tensor] = {}
        for members in alike.values():
            samples, after = self._batches.decode([self._requests[request_id] for request_id in members])
            waveforms.update(zip(members, samples, strict=True))
            states.update(zip(members, after, strict=True))
        # Nothing may fail from here on: a raised error means that no request has advanced.
        for request_id in request_ids:
            chunk = self._requests[request_id]
            chunk.carry.state = None if chunk.last else states[request_id]
        heard = {request_id for request_id, waveform in waveforms.items() if waveform.numel()}
        return {
            request_id: StepResult({"audio": waveforms[request_id]} if request_id in heard else {})
            for request_id in request_ids
        }
