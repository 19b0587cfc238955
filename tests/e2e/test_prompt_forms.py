"""A prompt as token ids with media, or as embeddings, gets the answer that it gets as messages."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import pytest
import torch

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.errors import InvalidRequest, PromptTooLong
from omni_actors.protocol.payloads import StageParams
from tests.support.pipelines import RunningPipeline
from tests.support.reference import Reference
from tests.support.stage_driver import SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {
    "params": {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 12}},
    "seed": 5,
    "voice": "Ethan",
    "timeout": 120,
}
SECONDS = numpy.arange(16_000) / 16_000
SOUND = ((0.3 * numpy.sin(1500 * SECONDS)).astype(numpy.float32), 16_000)
LOW_SOUND = ((0.3 * numpy.sin(700 * SECONDS[:9000])).astype(numpy.float32), 16_000)
PICTURE = numpy.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=numpy.uint8)
FILM = (numpy.random.default_rng(7).integers(0, 255, (8, 112, 112, 3), dtype=numpy.uint8), 2.0)
PARTS: list[dict[str, Any]] = [
    {"type": "audio", "audio": SOUND},
    {"type": "image", "image": PICTURE},
    {"type": "audio", "audio": LOW_SOUND},
    {"type": "video", "video": FILM},
    {"type": "text", "text": "What is this?"},
]
ROOMY = {**SMALL, "max_model_len": 1024, "max_num_batched_tokens": 1024}  # for the places of all these media
MESSAGES = [{"role": "user", "content": PARTS}]
DATA: dict[str, Any] = {"audio": [SOUND, LOW_SOUND], "image": PICTURE, "video": [FILM]}


@pytest.fixture(scope="module")
def token_ids(reference: Reference) -> list[int]:
    """The prompt's tokens, with one placeholder for each medium."""
    content = [{"type": part["type"], "text": part.get("text", "")} for part in PARTS]
    return list(reference.processor.tokenizer(reference.prompt([{"role": "user", "content": content}]))["input_ids"])


def assert_same(outputs: list[OmniRequestOutput]) -> None:
    first = outputs[0]
    assert len(first.token_ids) == 8
    assert len(first.audio) == 12 * 480
    for output in outputs[1:]:
        assert output.token_ids == first.token_ids
        assert output.text == first.text
        assert output.usage["talker"].output_tokens == first.usage["talker"].output_tokens
        numpy.testing.assert_allclose(output.audio, first.audio, atol=1e-4 * float(numpy.abs(first.audio).max()))


def test_token_ids_with_media_equal_the_messages_that_they_come_from(
    tiny_pipeline: RunningPipeline, token_ids: list[int]
) -> None:
    as_arguments = {"audios": DATA["audio"], "images": [PICTURE], "videos": [FILM]}
    asks: list[tuple[Any, dict[str, Any]]] = [
        (MESSAGES, {}),
        ({"messages": MESSAGES}, {}),
        ({"prompt_token_ids": token_ids, "multi_modal_data": DATA}, {}),
        ({"prompt_token_ids": token_ids}, as_arguments),
    ]

    async def ask_all() -> list[OmniRequestOutput]:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            return await asyncio.gather(*(client.generate(prompt, **OPTIONS, **more) for prompt, more in asks))

    outputs = asyncio.run(ask_all())
    with OmniClient(tiny_pipeline.endpoint) as client:
        outputs.append(client.generate(asks[2][0], **OPTIONS))
        swapped = {**DATA, "audio": [LOW_SOUND, SOUND]}
        other = client.generate({"prompt_token_ids": token_ids, "multi_modal_data": swapped}, **OPTIONS)
        with pytest.raises(InvalidRequest, match="for 1 audio media"):
            client.generate({"prompt_token_ids": token_ids, "multi_modal_data": {**DATA, "audio": SOUND}}, **OPTIONS)
    assert_same(outputs)
    assert other.token_ids != outputs[0].token_ids or not numpy.array_equal(other.audio, outputs[0].audio)


def test_embeddings_equal_the_tokens_whose_embeddings_they_are(
    tiny_pipeline: RunningPipeline, reference: Reference
) -> None:
    """Text and sound: what the talker gets of the prompt depends on its embeddings."""
    text = reference.prompt([{"role": "user", "content": "What is the capital of France?"}])
    token_ids = list(reference.processor.tokenizer(text)["input_ids"])
    rows = reference.model.thinker.get_input_embeddings().weight.detach()[torch.tensor(token_ids)]
    width = rows.shape[1]
    with OmniClient(tiny_pipeline.endpoint) as client:
        outputs = [
            client.generate(prompt, **OPTIONS)
            for prompt in (
                "What is the capital of France?",
                {"prompt_token_ids": token_ids},
                {"prompt_embeds": rows},
                {"prompt_embeds": rows.numpy(), "prompt_token_ids": token_ids},
            )
        ]
        assert_same(outputs)
        assert outputs[2].usage["thinker"].input_tokens == len(token_ids)
        with pytest.raises(InvalidRequest, match=f"have {width + 1} values per position; this model takes {width}"):
            client.generate({"prompt_embeds": torch.zeros(2, width + 1)}, **OPTIONS)
        with pytest.raises(PromptTooLong, match="2048 tokens"):
            client.generate({"prompt_embeds": torch.zeros(2048, width)}, **OPTIONS)
        with pytest.raises(InvalidRequest, match=r"none of the stages .* wants 'style'"):
            client.generate("x", additional_information={"style": 1}, **OPTIONS)
    tiny_pipeline.assert_idle()


def test_one_stage_takes_every_form(tiny_pipeline: RunningPipeline, tiny_checkpoint: Any, token_ids: list[int]) -> None:
    with OmniClient(tiny_pipeline.endpoint) as client:
        answer = client.generate(MESSAGES, **OPTIONS)
    with_media: dict[str, Any] = {"prompt_token_ids": token_ids, "multi_modal_data": DATA}
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "autoregressive", ROOMY)
    with StageLLM(arguments) as stage:
        table = stage.engine.core.worker.model_runner.model.language_model.model.embed_tokens.weight.detach()
        media, plain, embeds, *wrong = stage.generate(
            [
                with_media,
                {"prompt_token_ids": [5, 6, 7]},
                {"prompt_embeds": table[torch.tensor([5, 6, 7])]},
                {"prompt_token_id": [5]},
                {**with_media, "multi_modal_data": {"audio": SOUND}},
                {"prompt_token_ids": [5], "additional_information": {"style": 1}},
                {"prompt_embeds": table[:2, 1:]},
            ],
            StageParams(max_tokens=8),
        )
    assert media.error is None
    assert media.token_ids == answer.token_ids
    assert embeds.token_ids == plain.token_ids
    words = ["Did you mean 'prompt_token_ids'", "media", "does not want 'style'", "prompt_embeds: needs the shape"]
    for result, word in zip(wrong, words, strict=True):
        assert word in str(result.error), result
    prompt_arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "prompt"), "prompt", ROOMY)
    with StageLLM(prompt_arguments) as stage:
        (encoded,) = stage.generate([with_media])
        assert encoded.error is None
        assert len(encoded.token_ids) > len(token_ids), "a medium takes many places"
        assert "vllm.0" in encoded.tensors


def test_a_stage_without_media_says_so(tiny_checkpoint: Any, token_ids: list[int]) -> None:
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive", SMALL)
    with StageLLM(arguments) as stage:
        (refused,) = stage.generate([{"prompt_token_ids": token_ids, "multi_modal_data": DATA}])
    assert isinstance(refused.error, InvalidRequest)
    assert "'talker' takes no media" in refused.error.message
