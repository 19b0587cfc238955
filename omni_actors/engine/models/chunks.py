"""What vocoders have in common: runners, the codes of a request, and where an utterance is cut.

It is cut so that decoding can begin before it is complete: arithmetic in blocks of the vocoder.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from omni_actors.config.checks import check_chunks
from omni_actors.config.schema import DecodeConfig
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import DiffusionJob, DiffusionModelRunner, DiffusionStream
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WARM_UP = "_warm_up"  # a request


@dataclass(frozen=True)
class ChunkPolicy:
    """Chunk lengths in blocks: small at first, then each as long as all before it together, up to a limit.

    A chunk comes without a gap if it is made while all before it is heard; that it is not longer than what is heard
    leaves half of the time for it even if the talker is only twice as fast as speech (docs/benchmarks.md).

    The boundaries depend on nothing but this policy, never on when tokens arrive, so that a seed gives one waveform.

    Args:
        first: blocks of the first chunk; the first sound waits for them and for the look-ahead.
        largest: blocks of the longest chunk. Longer chunks cost less (each computes its look-ahead) but come later.
        look_ahead: blocks behind a chunk that are computed with it and thrown away.
        shift: blocks by which the first chunk is longer; so all others begin later.
    """

    first: int = 1
    largest: int = 8
    look_ahead: int = 1
    shift: int = 0

    def end(self, begin: int) -> int:
        """End (exclusive) of the chunk that begins at block `begin`."""
        begin = max(0, begin - self.shift)
        return self.shift + begin + min(self.largest, max(self.first, begin))


def read_decode(
    options: Mapping[str, Any], default: ChunkPolicy, solvers: Sequence[str] = ()
) -> tuple[DecodeConfig, ChunkPolicy | None, str]:
    """How a stage decodes by its configuration, the policy (None for whole utterances) and the solver.

    What is not given comes from the model: its policy and its first solver; "" if it has none.

    Raises:
        ConfigError: an option is unknown or out of range, or two contradict one another.
    """
    try:
        given = msgspec.convert(dict(options), DecodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"decode: {error}.") from error
    check_chunks(given, "decode")
    solver = given.solver or (solvers[0] if solvers else "")
    if solver and not solvers:
        raise ConfigError(f"decode.solver is {solver!r}, but this model has no flow to solve; remove it.")
    if given.policy == "whole":
        return given, None, solver
    first = given.first_blocks or default.first
    largest = given.largest_blocks or max(default.largest, first)  # a long first chunk raises the limit
    if largest < first:
        raise ConfigError(f"decode.largest_blocks is {largest}; the first chunk has {first} blocks.")
    look_ahead = default.look_ahead if given.look_ahead_blocks is None else given.look_ahead_blocks
    return given, ChunkPolicy(first, largest, look_ahead), solver


class ChunkStream(DiffusionStream):
    """A request of a decoder: collects whole frames of codes; a subclass cuts them into chunks.

    Args:
        width: codes of a frame.
        values: that a code can have.
        longest: frames of an utterance.
        carried: bytes that a chunk leaves for the next one; 0 if there is none.
        largest: bytes that the largest chunk holds and needs in a step; likewise.
    """

    def __init__(self, width: int, values: int, longest: int, carried: int, largest: int) -> None:
        self._width, self._values, self._longest = width, values, longest
        self.held_bytes, self.job_bytes = carried, largest
        self._codes: list[int] = []
        self._complete = False

    def _return(self, job: DiffusionJob, *, last: bool) -> DiffusionJob:
        """Note the chunk that `next_job` returns."""
        if last:
            self.finished, self.held_bytes, self.job_bytes = True, 0, 0
        return job

    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Append whole frames, the codes of one after those of the other.

        Raises:
            InvalidRequest: the input was complete, or ends without a frame.
            PromptTooLong: the utterance is longer than the decoder's positions.
            InvalidPayload: the codes are no whole frames, or one is outside of the codebook.
        """
        width, values = self._width, self._values
        if self._complete and (token_ids or not complete):
            raise InvalidRequest("The vocoder got more codes after the last.")
        if len(token_ids) % width:
            raise InvalidPayload(
                f"{len(token_ids)} codes are no whole frames; this decoder takes frames of {width} codes.",
                hint=f"Send all {width} codes of a frame together; talker and decoder must be of one checkpoint.",
            )
        if (frames := (len(self._codes) + len(token_ids)) // width) > self._longest:
            raise PromptTooLong(f"{frames} frames exceed the decoder's maximum of {self._longest}.")
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= values):
            index = next(index for index, code in enumerate(token_ids) if not 0 <= code < values)
            raise InvalidPayload(f"Code {token_ids[index]} of codebook {index % width} is outside 0..{values - 1}.")
        if complete and frames == 0:
            raise InvalidRequest("The vocoder got no frame.", hint="Let the talker produce at least one.")
        self._codes.extend(token_ids)
        self.input_tokens, self._complete = len(self._codes), complete


class VocoderRunner(DiffusionModelRunner):
    """What is common to the models that turn codes to sound, f32 [samples].

    Attributes:
        chunks: how utterances are cut unless the YAML says otherwise.
        auto_precision: what "auto" means on a type of device.
        solvers: those that the model has.
        half: the type of weights in half precision.
    """

    chunks: ClassVar[ChunkPolicy]
    auto_precision: ClassVar[Mapping[str, str]] = {"cuda": "tf32", "cpu": "float32"}
    solvers: ClassVar[tuple[str, ...]] = ()
    half: ClassVar[torch.dtype] = torch.bfloat16

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.model_name: str = vllm_config.model_config.model
        options = omni_options(vllm_config).get("decode") or {}
        given, self.policy, self.solver = read_decode(options, self.chunks, self.solvers)
        self.precision = given.precision if given.precision != "auto" else self.auto_precision[device.type]
        self.dtype = self.half if self.precision == "bf16" else torch.float32
        self.max_requests: int = vllm_config.scheduler_config.max_num_seqs
        if device.type == "cuda":
            # The worker forbids TF32 for every model; this one, alone in its process, may allow it.
            torch.backends.cudnn.allow_tf32 = self.precision != "float32"
            torch.backends.cuda.matmul.allow_tf32 = self.precision != "float32"
        self._carries: weakref.WeakSet[Any] = weakref.WeakSet()  # of all streams; counted, so that a leak shows

    def rehearse(self, stream: DiffusionStream) -> Iterator[DiffusionJob]:
        """Decode a stream as the request `WARM_UP`; each chunk is given out before it is computed."""
        while (job := stream.next_job()) is not None:
            self.add(WARM_UP, job)
            yield job
            for _ in range(job.num_steps):
                self.step([WARM_UP])
            self.remove(WARM_UP)
        stream.close()
