"""Runs stage engines in the test's process and collects their events by request."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig, build_engine
from omni_actors.engine.autoregressive import AutoregressiveEngine
from omni_actors.engine.rows import to_host, to_torch
from omni_actors.errors import OmniError
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import (
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)
from tests.support.reference import ReferenceResult

VOICES = ("Chelsie", "Ethan")
SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "dtype": "float32",
}


def make_engine(
    checkpoint: Path, stage: str, *, asynchronous: bool | None = None, **engine: Any
) -> AutoregressiveEngine:
    model_config = OmniModelConfig(str(checkpoint), stage)
    built = build_engine(OmniEngineArgs(model_config, "autoregressive", {**SMALL, **engine}, asynchronous))
    assert isinstance(built, AutoregressiveEngine)
    return built


class Driver:
    """One engine, and its events since `clear`."""

    def __init__(self, engine: AutoregressiveEngine) -> None:
        self.engine = engine
        self.clear()

    def clear(self) -> None:
        self.events: dict[str, list[EngineEvent]] = defaultdict(list)
        self.steps = 0

    def start(
        self, request_id: str, inputs: StageInputs, *, seed: int = 0, voice=None, streams=True, priority=0, **params
    ) -> None:
        request = StageRequest(request_id, StageParams(**params), seed, voice, priority, streams)
        self.engine.start(request, inputs)

    def step(self) -> None:
        self.steps += 1
        for event in self.engine.step():
            self.events[event.request_id].append(event)

    def run(self, after_step: Callable[[int], None] | None = None, limit: int = 2000) -> None:
        """Step until nothing is runnable."""
        for number in range(limit):
            if not (self.engine.runnable() or self.engine.busy()):
                return
            self.step()
            if after_step is not None:
                after_step(number)
        raise AssertionError(f"still runnable after {limit} steps: {self.engine.counts()}")

    def text(self, request_id: str) -> str:
        return "".join(event.text for event in self.events[request_id] if isinstance(event, TextEvent))

    def written(self, request_id: str) -> list[int]:
        """The tokens of its text alone, where a stage streams tokens as well."""
        return [token for event in self.events[request_id] if isinstance(event, TextEvent) for token in event.token_ids]

    def tokens(self, request_id: str) -> list[int]:
        kinds = (TextEvent, StreamEvent)
        return [token for event in self.events[request_id] if isinstance(event, kinds) for token in event.token_ids]

    def streams(self, request_id: str) -> list[StreamEvent]:
        return [event for event in self.events[request_id] if isinstance(event, StreamEvent)]

    def rows(self, request_id: str) -> torch.Tensor:
        """All rows, checked to be without gap or overlap."""
        parts: list[torch.Tensor] = []
        for event in self.streams(request_id):
            assert event.start == sum(map(len, parts))
            if "rows" in event.tensors:
                parts.append(to_torch(event.tensors["rows"]))
        return torch.cat(parts)

    def finished(self, request_id: str) -> FinishedEvent:
        last = self.events[request_id][-1]
        assert isinstance(last, FinishedEvent), self.events[request_id]
        assert sum(isinstance(event, FinishedEvent) for event in self.events[request_id]) == 1
        return last

    def error(self, request_id: str) -> OmniError:
        last = self.events[request_id][-1]
        assert isinstance(last, ErrorEvent), self.events[request_id]
        return last.error

    def assert_idle(self) -> None:
        assert not self.engine.runnable()
        counts = self.engine.counts()
        assert not any(counts.values()), counts


@contextmanager
def count_preemptions(engine: AutoregressiveEngine) -> Iterator[list[str]]:
    """A list that receives the id of every request preempted while the block runs."""
    scheduler = engine.core.scheduler
    original = scheduler.schedule
    seen: list[str] = []

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        seen.extend(output.preempted_req_ids or ())
        return output

    scheduler.schedule = schedule
    try:
        yield seen
    finally:
        del scheduler.schedule  # uncovers the method of the class


def kv_cache(checkpoint: Path, stage: str, blocks: int, block: int = 32) -> dict[str, int]:
    """Options of an engine whose KV cache has so many blocks, each of `block` positions, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())[f"{stage}_config"]
    text = config.get("text_config", config)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    position = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head * 4  # keys and values
    return {"block_size": block, "kv_cache_memory_bytes": blocks * block * position}


def prompt_length(answer: ReferenceResult) -> int:
    return len(answer.prompt_token_ids)


def sample(driver: Driver, answer: ReferenceResult, name: str, **params) -> None:
    """Start a talker request with all of the answer's rows."""
    driver.start(name, talker_inputs(answer.thinker_rows, prompt_length(answer)), **params)


def token_inputs(token_ids: list[int]) -> StageInputs:
    return StageInputs(token_ids=token_ids)


def talker_inputs(
    rows: torch.Tensor, prompt_tokens: int, *, replies: int | None = None, positions: torch.Tensor | None = None
) -> StageInputs:
    """Inputs of a talker request with `replies` reply rows after the first; None means all of them."""
    tensors: dict[str, HostTensor] = {"prompt_rows": to_host(rows[: prompt_tokens + 1])}
    end = len(rows) if replies is None else prompt_tokens + 1 + replies
    if end > prompt_tokens + 1:
        tensors["reply_rows"] = to_host(rows[prompt_tokens + 1 : end])
    if positions is not None:
        tensors["mrope_positions"] = to_host(positions)
    return StageInputs(tensors=tensors, complete=replies is None)


def encode_media_prompt(checkpoint: Path, text: str, media: dict, **processing: object) -> StageInputs:
    """The prompt stage's output for a multimodal prompt; `processing` goes to the model's processor."""
    arguments = OmniEngineArgs(OmniModelConfig(str(checkpoint), "thinker"), "prompt", SMALL)
    processor = InputProcessor(arguments.create_engine_config())
    request = processor.process_inputs(
        "someone-else",
        {"prompt": text, "multi_modal_data": media, "mm_processor_kwargs": processing},
        SamplingParams(max_tokens=1, temperature=1.0),
        supported_tasks=("generate",),
    )
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
    return StageInputs(
        token_ids=request.prompt_token_ids,
        tensors={f"vllm.{index}": HostTensor(DType.U8, (len(frame),), frame) for index, frame in enumerate(frames)},
    )
