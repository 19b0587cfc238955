"""Tokens become text and calls of tools: what a prompt has of tools, what is spoken, which stop strings end it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from omni_actors.engine.adapter import TextDecoder
from omni_actors.engine.core import make_request
from omni_actors.engine.prompt_processors import ChatTemplate
from omni_actors.engine.tool_calls import ToolCallReader, parser_class
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.fields import DType, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, ToolCall, Tools
from tests.support.paths import REPOSITORY

TEMPLATE = str(REPOSITORY / "stage_configs" / "qwen2_5_omni_tools.jinja")
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = Tools((json.dumps(WEATHER),))


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return get_tokenizer(str(tiny_checkpoint))


def reader(tokenizer: Any, tools: Tools = TOOLS) -> ToolCallReader:
    return ToolCallReader(parser_class("hermes", tokenizer), tokenizer, tools, [1, 2, 3])


@pytest.mark.parametrize("answer", ["Nothing to call.", "a < b and <tool", "<", "Grüße 🌊"])
def test_text_that_is_no_call_is_all_there_and_all_spoken(tokenizer: Any, answer: str) -> None:
    found = reader(tokenizer)
    detokenized = tokenizer.decode(tokenizer(answer)["input_ids"])
    assert detokenized == answer
    token_ids = tokenizer(answer)["input_ids"]
    texts = [tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
    said = ""
    for index, token in enumerate(token_ids):
        fresh = texts[index + 1].removesuffix("\ufffd")[len(texts[index].removesuffix("\ufffd")) :]
        content, calls = found.read(fresh, [token], finished=index + 1 == len(token_ids))
        said += content
        assert calls == ()
    assert not found.calling
    assert found.spoken == len(token_ids)
    assert answer.startswith(said)


def test_a_parser_that_vllm_does_not_have_is_refused_with_the_nearest_one(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        parser_class("hermess", tokenizer)


def said(role: str, text: str, **more: Any) -> ChatMessage:
    return ChatMessage(role, (ContentPart(text=text),) if text else (), **more)


def test_without_tools_the_template_is_the_models_own(tokenizer: Any) -> None:
    media = tuple(Media(kind, MediaEncoding.FILE, TensorRef(DType.U8, (1,), 0)) for kind in ("image", "audio", "video"))
    user = ChatMessage("user", (*(ContentPart(media=index) for index in range(3)), ContentPart(text="What?")))
    plain = ChatTemplate(tokenizer, None, None)
    for messages in (
        (user,),
        (said("system", "Be brief."), user, said("assistant", "Yes."), said("user", "And?")),
        (said("user", "a"), said("system", "later"), said("user", "b")),
    ):
        prompt = Prompt(messages=messages, media=media)
        builtins = [plain_message(message, prompt) for message in messages]
        ours = tokenizer.apply_chat_template(
            builtins, chat_template=Path(TEMPLATE).read_text(), tokenize=False, add_generation_prompt=True
        )
        assert ours == plain.render(prompt)


def plain_message(message: ChatMessage, prompt: Prompt) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": part.text} if part.media is None else {"type": prompt.media[part.media].modality}
        for part in message.content
    ]
    return {"role": message.role, "content": parts}


def test_tools_are_refused_where_nothing_could_read_the_calls(tokenizer: Any) -> None:
    prompt = Prompt(messages=(said("user", "x"),), tools=TOOLS)
    with pytest.raises(InvalidRequest, match="--tool-call-parser"):
        ChatTemplate(tokenizer, None, None).render(prompt)
    with pytest.raises(ConfigError, match="no place for tools"):
        ChatTemplate(tokenizer, "hermes", None)
    with pytest.raises(ConfigError, match="cannot read"):
        ChatTemplate(tokenizer, "hermes", "/nowhere")
    wrong = said("assistant", "", tool_calls=(ToolCall("c", "weather", "[1]"),))
    with pytest.raises(InvalidRequest, match="arguments of the tool call 'weather'"):
        ChatTemplate(tokenizer, "hermes", TEMPLATE).render(Prompt(messages=(wrong,), tools=TOOLS))


def decoder_of(tokenizer: Any, **params: Any) -> TextDecoder:
    return TextDecoder(tokenizer, make_request("r", [1, 2], SamplingParams(**params)))


def output(token: int, logprobs: LogprobsLists | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", [token], new_logprobs=logprobs)


@pytest.mark.parametrize("stop", ["🌊", "🌊!"])
def test_a_token_within_a_character_waits_for_the_character(tokenizer: Any, stop: str) -> None:
    """The first bytes of a stop string have no text, and are not part of the answer either."""
    assert len(tokenizer.encode("🌊")) > 1
    decoder = decoder_of(tokenizer, stop=[stop])
    given, released = "", 0
    for token in tokenizer.encode("sea 🌊! more"):
        given += decoder.decode(output(token))[0]
        released = max(released, decoder.released)
        if decoder.stopped:
            break
    assert decoder.stopped
    assert given == "sea "
    assert released == len(tokenizer.encode("sea "))


def test_log_probabilities_that_were_given_out_are_forgotten(tokenizer: Any) -> None:
    """All but those from which a character is completed: an answer of 32,000 tokens would hold 150 MB."""
    tokens = tokenizer.encode("sea 🌊! " * 9)
    decoder = decoder_of(tokenizer, logprobs=1)
    before = sum(type(one) is Logprob for one in gc.get_objects())
    text = ""
    for token in tokens:
        made = output(token, logprobs=LogprobsLists(np.array([[token, 5]]), np.array([[-1.0, -2.0]]), np.array([1])))
        decoder.decode(made)
        (position,) = decoder.logprobs(made, 1)
        text += position.token.text
    assert text == "sea 🌊! " * 9
    assert sum(type(one) is Logprob for one in gc.get_objects()) < before + 18
