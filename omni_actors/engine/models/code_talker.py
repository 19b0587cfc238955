"""What all talkers have in common as vLLM models: their tokens are codes; some are never sampled."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sampling_params import SamplingParams
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.adapter import Admission, AutoregressiveAdapter, RequestOutputs
from omni_actors.engine.core import make_request
from omni_actors.engine.rows import check_rows, to_torch
from omni_actors.engine.sampling import make_sampling_params
from omni_actors.engine.scheduler import RowStream, RowUpdate
from omni_actors.engine.workers.runner import StreamedInputState, payload_of
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong, UnknownVoice
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import UNHEARD
from omni_actors.protocol.payloads import InformationValue, Prompt, StageParams
from omni_actors.stage.engine_interface import EngineEvent, StageRequest, StreamEvent

# For `support_torch_compile` of layers with M-RoPE, whose positions are [3, tokens]. vLLM's own models declare
# dimension 0 and cannot be compiled with it.
MROPE_DIMS: dict[str, int | list[int] | dict[int, str]] = {
    "input_ids": {0: "b"},
    "positions": {-1: "b"},
    "intermediate_tensors": {0: "b"},
    "inputs_embeds": {0: "b"},
}


class CodeTalker(nn.Module):
    """The layers between a table of codes and a head. A family sets `codec_embedding` and `never_sampled`.

    Attributes:
        decoder_class: vLLM's model of the layers.
        never_sampled: bool [vocabulary].
        text_table_name: of the table of texts in the checkpoint, for families that need it.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper]
    text_table_name: ClassVar[str] = ""

    decoder_class: ClassVar[type[nn.Module]]
    codec_embedding: nn.Module
    never_sampled: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: PretrainedConfig = vllm_config.model_config.hf_config
        self.config = config
        self.decoder = self.decoder_class(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "decoder"))
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def draw_all_codes(self) -> None:
        """Set both for a family whose codes may all be drawn, with a table in the place of that of the layers."""
        del self.decoder.embed_tokens
        self.codec_embedding = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        self.register_buffer("never_sampled", torch.zeros(self.config.vocab_size, dtype=torch.bool), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the whole checkpoint; return the names of the parameters that were set."""
        tables = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name == self.text_table_name:
                    tables.append(weight)
                else:
                    yield name, weight

        loaded = AutoWeightsLoader(self).load_weights(others(), mapper=self.hf_to_vllm_mapper)
        with torch.inference_mode():
            for table in tables:
                self.take_table(table)
        return loaded

    def take_table(self, table: torch.Tensor) -> None:
        """Keep what is needed of the table of texts [ids, width]."""

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embeddings of codes [tokens, width]; what a ModelState adds to them comes later."""
        embeddings: torch.Tensor = self.codec_embedding(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states [tokens, width], or what the next pipeline rank needs.

        Args:
            positions: [tokens], or [3, tokens] for M-RoPE.
        """
        if inputs_embeds is None and intermediate_tensors is None:
            inputs_embeds = self.codec_embedding(input_ids)
        hidden: torch.Tensor | IntermediateTensors = self.decoder(
            None, positions, intermediate_tensors, inputs_embeds=inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocabulary], minus infinity for what is never sampled; None where they are not gathered."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.never_sampled, float("-inf"))
        return logits


class ContinuedPositions(SupportsMRoPE):
    """Takes the positions of a request that is being added from its state: vLLM passes only its token ids.

    Attributes:
        next_positions: of that request, i64 [3, P]; None for text alone.
    """

    next_positions: torch.Tensor | None = None

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """M-RoPE positions i64 [3, len(input_tokens)], and by how much later positions exceed their index."""
        length = len(input_tokens)
        given = self.next_positions
        if given is None or not given.shape[1]:
            return torch.arange(length).expand(3, length), 0
        # The given positions, continued one by one (also over outputs computed again).
        following = int(given.max()) + 1
        tail = torch.arange(following, following + length - given.shape[1]).expand(3, -1)
        return torch.cat([given, tail], dim=1), following - given.shape[1]


Piece = TypeVar("Piece")


@dataclass(slots=True)
class Speech(Generic[Piece]):
    """A request of a talker, whose text adds a piece to the code of each position after the prompt.

    Args:
        length: positions of the prompt.
        ending: pieces that follow the last one.
        complete: whether no more will come; then the others are those that pad.
        prompt: inputs [length, width] on the device, until they are computed.
    """

    length: int
    ending: tuple[Piece, ...]
    text: list[Piece] = field(default_factory=list)
    complete: bool = False
    prompt: torch.Tensor | None = None

    def extend(self, text: Iterable[Piece], complete: bool) -> None:
        """Append text; with the last of it what ends it."""
        self.text.extend(text)
        if complete and not self.complete:
            self.text.extend(self.ending)
        self.complete = complete

    def at(self, index: int, pad: Piece) -> Piece:
        """The piece at a position, counted from the end of the prompt."""
        if index < len(self.text):
            return self.text[index]
        if not self.complete:
            # The scheduler holds such a request back, so this is an internal error; padding would only hide it.
            raise RuntimeError(f"Text {index} is needed, but only {len(self.text)} have arrived.")
        return pad


class TalkerState(DefaultModelState, StreamedInputState):
    """What is kept of the requests of a talker whose inputs are more than codes.

    All goes by absolute position, so that a preempted request, which computes its output again as a prompt, gets the
    same inputs.

    Attributes:
        payload_class: of the requests; those of vLLM's own warm-up carry none.
        pad: the piece that follows the end of a text.
    """

    supports_prompt_embeds = True
    dtype: torch.dtype  # declared as a name, too; vLLM has resolved it
    payload_class: ClassVar[type]
    pad: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._speeches: dict[str, Any] = {}

    @abstractmethod
    def begin(self, payload: Any) -> Speech[Any]:
        """A new request with the text that is known."""

    @abstractmethod
    def prompt_inputs(self, payload: Any) -> torch.Tensor:
        """The inputs of the prompt's positions [length, width], on the device."""

    @abstractmethod
    def pieces(self, rows: torch.Tensor) -> Iterable[Any]:
        """What rows of text add."""

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption and keeps its text, into slot `req_index`."""
        payload = payload_of(new_req_data)
        model: Any = self.model
        if isinstance(payload, self.payload_class):
            if new_req_data.req_id not in self._speeches:
                self._speeches[new_req_data.req_id] = self.begin(payload)
            self._speeches[new_req_data.req_id].prompt = self.prompt_inputs(payload)
            model.next_positions = getattr(payload, "positions", None)
        try:
            super().add_request(req_index, new_req_data)
        finally:
            model.next_positions = None

    def push_rows(self, request_id: str, update: RowUpdate) -> None:
        """Append text. Ignores unknown ids."""
        if (speech := self._speeches.get(request_id)) is not None:
            speech.extend((piece for rows in update.rows for piece in self.pieces(rows)), update.complete)

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._speeches.pop(request_id, None)

    # -- before the model

    def code_inputs(self, *step: Any) -> torch.Tensor:
        """The embeddings of the codes of a step [tokens, width], or where `put_codes` puts them; by default vLLM's."""
        return super().prepare_inputs_embeds(*step)

    def put_codes(self, inputs: torch.Tensor, speech: Any, first: int, slot: int, ids: torch.Tensor) -> None:
        """Put the embeddings of what a request has spoken where they go; by default they are there.

        Args:
            inputs: [codes, width].
            first: number of the first of the codes.
            slot: of the request.
            ids: [codes].
        """

    @abstractmethod
    def last_codes(self, batch: InputBatch) -> torch.Tensor:
        """The embeddings [requests, width] of the last code, or frame, of each request of a batch."""

    @abstractmethod
    def text_rows(self, pieces: Sequence[Any]) -> torch.Tensor:
        """What pieces of text add [pieces, width], or [width] if it is the same for all; on the device."""

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: InputBatch, req_states: Any
    ) -> torch.Tensor:
        """The inputs of a step's positions [tokens, width]: rows of prompts, then embeddings of codes plus text."""
        count = input_batch.num_reqs
        speeches: list[Any] = [self._speeches.get(request_id) for request_id in input_batch.req_ids]
        starts = input_batch.num_computed_tokens_np[:count].tolist()
        pieces: list[Any] = []
        if not input_batch.has_prefill and all(speeches):  # the usual step, in as few launches as possible
            for speech, start in zip(speeches, starts, strict=True):
                pieces.append(speech.at(start - speech.length, self.pad))
            torch.add(self.last_codes(input_batch), self.text_rows(pieces), out=self.inputs_embeds[:count])
            return self.inputs_embeds[: input_batch.num_tokens_after_padding]
        inputs = self.code_inputs(scheduled_encoder_inputs, input_batch, req_states)
        offsets = input_batch.query_start_loc_np[: count + 1].tolist()
        places: list[int] = []
        for index, speech in enumerate(speeches):
            if speech is None:
                continue
            start, row, last = starts[index], offsets[index], offsets[index + 1]
            if speech.prompt is not None and start < speech.length:
                rows = speech.prompt[start : start + last - row]
                inputs[row : row + len(rows)] = rows
                start, row = start + len(rows), row + len(rows)
            first = start - speech.length
            if row < last:
                slot = int(input_batch.idx_mapping_np[index])
                self.put_codes(inputs[row:last], speech, first, slot, input_batch.input_ids[row:last])
                pieces += [speech.at(first + place, self.pad) for place in range(last - row)]
                places += range(row, last)
            if first >= 0:
                speech.prompt = None
        if pieces:
            on_device = async_tensor_h2d(places, device=self.device, dtype=torch.int64)
            inputs.index_add_(0, on_device, self.text_rows(pieces).expand(len(pieces), -1))
        return inputs

    def omni_counts(self) -> dict[str, int]:
        """Requests that speak, and pieces of text held for them."""
        texts = sum(len(speech.text) for speech in self._speeches.values())
        return {"speeches": len(self._speeches), "worker_rows": texts}


def chosen_voice(name: str | None, voices: Iterable[str]) -> str:
    """The name of a voice, the first where none is given. Raises `UnknownVoice` for one that is not among them."""
    known = list(voices)
    if name is None:
        return known[0]
    if name not in known:
        raise UnknownVoice(f"There is no voice {name[:64]!r}; the voices are {', '.join(known)}.", field="voice")
    return name


CHARACTERS = 16  # more of them a token than any text has: what is longer is not even counted


def text_to_speak(prompt: Prompt) -> str:
    """The text of a prompt that is spoken as it is. Raises `InvalidRequest` for any other prompt."""
    parts = [part.text for message in prompt.messages for part in message.content]
    if len(prompt.messages) != 1 or prompt.messages[0].role != "user" or len(parts) != 1 or parts[0] is None:
        raise InvalidRequest(
            "This model speaks a text: the prompt has to be one message of the user with one text.",
            hint="Send the text alone, without token ids, media or other messages.",
            field="input",
        )
    if not parts[0].strip():
        raise InvalidRequest("The text to speak is empty.", hint="Send some text.", field="input")
    return parts[0]


def text_of(given: Mapping[str, InformationValue], name: str) -> str | None:
    """A text that may be missing. Raises `InvalidRequest` for an empty one, and for what is none."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}: must be a text that is not empty; got {str(value)[:64]!r}.", field=name)
    return value


def tokens_of(tokenizer: Any, text: str, field: str, most: int, around: int = 0) -> list[int]:
    """The token ids of a client's text. Raises `OmniError` for far too long a text, and for one without any.

    Args:
        most: tokens of a prompt.
        around: ids that are not the client's.
    """
    if len(text) > CHARACTERS * most:
        raise PromptTooLong(
            f"{field}: {len(text)} characters are more than this stage takes (max_model_len {most}).",
            hint="Send a shorter text, or several one after the other.",
            field=field,
        )
    ids: list[int] = tokenizer(text)["input_ids"]
    if len(ids) <= around:
        raise InvalidRequest(f"{field}: the text has no token of its own.", hint="Send words.", field=field)
    return ids


class CodeTalkerAdapter(AutoregressiveAdapter):
    """What the adapters of all talkers have in common.

    Attributes:
        end_token_ids: codes that end the speech. A request that ignores them never draws one, since none has a sound.
        row_width: of the thinker's rows, where it takes any.
    """

    end_token_ids: frozenset[int]
    row_width: int

    def rows_of(self, rows: HostTensor, name: str = "rows", *, minimum: int = 0) -> torch.Tensor:
        """Rows [n, row_width] on the CPU in the model's dtype. Raises `InvalidPayload`."""
        check_rows(rows, self.row_width, name, minimum=minimum)
        return to_torch(rows, name).to(self.model_dtype)

    def check_names(self, tensors: Mapping[str, HostTensor], known: Iterable[str]) -> None:
        """Raise `InvalidPayload` if one of the tensors is not among the known ones."""
        if foreign := sorted(tensors.keys() - set(known)):
            raise InvalidPayload(f"The talker takes no tensors named {foreign}.")

    def sampling_of(
        self, request: StageRequest, params: StageParams | None = None, payload: Any = None
    ) -> SamplingParams:
        """How vLLM draws a request's codes; see `admitted`. Raises `OmniError` for wrong parameters."""
        params = params or request.params.merged_over(self.defaults)
        if params.ignore_eos:
            never = dict.fromkeys(self.end_token_ids, float("-inf"))
            params = msgspec.structs.replace(params, logit_bias={**(params.logit_bias or {}), **never})
        return make_sampling_params(
            params,
            seed=request.effective_seed,
            end_token_ids=self.end_token_ids,
            vocabulary=self.vocabulary,
            payload=payload,
        )

    def admitted(
        self,
        request: StageRequest,
        prompt: Sequence[int] | torch.Tensor,
        outputs: RequestOutputs,
        stream: RowStream,
        *,
        payload: Any = None,
        params: StageParams | None = None,
        work: Callable[[], None] | None = None,
    ) -> Admission:
        """vLLM's request over codes. Raises `OmniError` for a prompt that is too long and for wrong parameters.

        Args:
            prompt: codes, which count for penalties, or embeddings [positions, width].
            params: the request's, with all defaults; by default those of the stage.
        """
        self.check_length(len(prompt))
        sampling = self.sampling_of(request, params, payload)
        token_ids, embeds = (None, prompt) if isinstance(prompt, torch.Tensor) else (prompt, None)
        core_request = make_request(
            request.request_id, token_ids, sampling, priority=request.priority, prompt_embeds=embeds
        )
        return Admission(core_request, outputs, stream, work=work)

    def mrope_positions(self, tensor: HostTensor, length: int) -> torch.Tensor:
        """The thinker's M-RoPE positions i64 [3, length]. Raises `InvalidPayload` for anything else."""
        if tensor.dtype is not DType.I64 or tuple(tensor.shape) != (3, length):
            raise InvalidPayload(f"mrope_positions: needs i64 [3, {length}]; got {tensor.dtype} {list(tensor.shape)}.")
        positions = to_torch(tensor, "mrope_positions")
        # vLLM keeps a rotary table of four times this many positions for M-RoPE; beyond it the device would fault.
        most = 4 * self.vllm_config.model_config.hf_config.max_position_embeddings - self.max_model_len
        if int(positions.min()) < 0 or int(positions.max()) >= most:
            raise InvalidPayload(f"mrope_positions: values must lie in [0, {most}).")
        return positions


class CodeOutputs(RequestOutputs):
    """Codes of one request as a stream, in events of several: one a token would cost more time than to make it.

    Args:
        blocks: frames in the first event, the second, and so on.
    """

    def __init__(self, request_id: str, blocks: Sequence[int]) -> None:
        self._request_id, self._blocks = request_id, blocks
        self._events = self._sent = 0  # events and codes
        self._generated = 0  # since the last event, with tokens that are no sound
        self._held: list[list[int]] = []
        self._lead: list[int] = []

    def lead(self, codes: list[int]) -> None:
        """Set codes of frames that go before those of the speech, and are not to be heard."""
        self._lead = codes

    def grouped(self, output: EngineCoreOutput, frames: Iterable[list[int]], *, final: bool) -> Sequence[EngineEvent]:
        """An event once there are enough frames, with these; and the rest with the last."""
        self._generated += len(output.new_token_ids)
        self._held += frames
        if len(self._held) < self._blocks[min(self._events, len(self._blocks) - 1)] and not final:
            return ()
        lead = self._lead if self._held else []
        codes = [*lead, *itertools.chain.from_iterable(self._held)]
        scalars = {UNHEARD: len(lead)} if lead else {}
        start, generated = self._sent, self._generated
        self._lead, self._held, self._generated = [], [], 0
        self._events, self._sent = self._events + 1, start + len(codes)
        return (
            StreamEvent(
                self._request_id, token_ids=codes, start=start, scalars=scalars, final=final, generated=generated
            ),
        )


class CodecOutputs(CodeOutputs):
    """Codec tokens, sent when they complete a block of the vocoder, which cannot use less.

    The token that ends the speech is not sound and is left out.

    Args:
        block: codec tokens per block.
    """

    def __init__(self, request_id: str, end_token_ids: frozenset[int], block: int) -> None:
        super().__init__(request_id, (block,))
        self._end_token_ids = end_token_ids

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """One event per block of codec tokens, and the rest with the last; an end token is left out."""
        return self.collect(output, final=output.finish_reason is not None)

    def collect(self, output: EngineCoreOutput, *, final: bool) -> Sequence[EngineEvent]:
        """See `convert`; `final` says whether this is the last of them."""
        tokens = [[token] for token in output.new_token_ids]
        if output.finish_reason is VllmFinishReason.STOP and tokens and tokens[-1][0] in self._end_token_ids:
            tokens.pop()
        return self.grouped(output, tokens, final=final)
