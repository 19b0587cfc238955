"""Tests of encoder stages with Z-Image's text encoder, in this process, against transformers' hidden states."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.encoder import EncoderEngine
from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidRequest, OmniError, PromptTooLong
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams
from omni_actors.stage.engine_interface import FinishedEvent, StageInputs, StageRequest, StreamEvent
from tests.support.reference import one_thread
from tests.support.z_image_engine import Painter
from tools.checkpoints.pictures import Z_IMAGE

PROMPTS = {"short": ("x", None), "both": ("A red fox in the snow", "blue"), "long": ("a long one " * 30, "")}


@pytest.fixture(scope="module")
def painter():
    return Painter(Z_IMAGE.tiny_pipeline())


@pytest.fixture(scope="module")
def encoder(tiny_z_image):
    # A step takes 64 tokens, so that the long prompt is prefilled in chunks.
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_chunked_prefill": True}
    cpu = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 24}
    made = EncoderEngine(OmniEngineArgs(OmniModelConfig(str(tiny_z_image), "text_encoder"), "encoder", options | cpu))
    yield made
    made.shutdown()


def begin(encoder, name, prompt, negative=None):
    asked = None if prompt is None else Prompt(messages=(ChatMessage("user", (ContentPart(prompt),)),))
    encoder.start(StageRequest(name, StageParams(negative_prompt=negative), seed=0), StageInputs(prompt=asked))


def run(encoder):
    events = []
    with one_thread():
        while encoder.runnable():
            events += encoder.step()
    return events


def test_both_prompts_of_all_requests_have_the_hidden_states_of_transformers(encoder, painter):
    for name, (prompt, negative) in PROMPTS.items():
        begin(encoder, name, prompt, negative)
    events = run(encoder)
    for name, (prompt, negative) in PROMPTS.items():
        with torch.no_grad():
            expected = painter.pipeline.encode_prompt(
                prompt, do_classifier_free_guidance=True, negative_prompt=negative
            )
        stream, finished = [event for event in events if event.request_id == name]
        assert isinstance(stream, StreamEvent)
        assert stream.final
        for key, (states,) in zip(("states", "negative_states"), expected, strict=True):
            given = to_torch(stream.tensors[key])
            assert given.shape == states.shape
            assert (given - states).abs().max() < 1e-4
        assert isinstance(finished, FinishedEvent)
        assert finished.input_tokens == sum(len(states) for (states,) in expected)
    assert not any(encoder.counts().values())


def test_an_aborted_request_leaves_nothing_behind_and_the_others_go_on(encoder):
    begin(encoder, "doomed", "a long one " * 30)
    begin(encoder, "other", "x")
    encoder.step()
    encoder.abort("doomed")
    encoder.abort("doomed")
    events = run(encoder)
    assert {event.request_id for event in events} == {"other"}
    assert not any(encoder.counts().values())


@pytest.mark.parametrize(
    ("prompt", "negative", "kind", "message"),
    [
        ("  ", None, InvalidRequest, "The prompt is empty"),
        ("word " * 600, None, PromptTooLong, "at most 512 fit"),
        ("x", "word " * 600, PromptTooLong, "at most 512 fit"),
        (None, None, OmniError, "needs a prompt"),
    ],
)
def test_a_prompt_that_it_cannot_take_is_refused_and_leaves_nothing_behind(encoder, prompt, negative, kind, message):
    with pytest.raises(kind, match=message):
        begin(encoder, "bad", prompt, negative)
    assert not any(encoder.counts().values())
