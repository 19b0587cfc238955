"""Turns chat messages into the text of a prompt, with the model's chat template or one for tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.payloads import ChatMessage, Prompt
from omni_actors.protocol.tools import TOOLS, ToolCall, function_of

TOOLS_WORD = re.compile(r"\btools\b")


class ChatTemplate:
    """Renders prompts.

    Args:
        processor: transformers' processor of the model, with its own template.
        parser: vLLM's name of the parser for tool calls; without one, no tools are taken.
        tool_template: file with the template of prompts with tools; `None` for the model's own.
        text_only: the model takes no media, so its template may expect contents as texts instead of lists of parts.

    Raises:
        ConfigError: there is no template, the file cannot be read, or no template has a place for tools.
    """

    def __init__(
        self, processor: Any, parser: str | None, tool_template: str | None, *, text_only: bool = False
    ) -> None:
        if not processor.chat_template:
            raise ConfigError(
                "The model's tokenizer has no chat template.", hint="Use the checkpoint that was trained to chat."
            )
        self._text_only = text_only
        self._processor = processor
        self._parser = parser
        self._tool_template: str | None = None
        if tool_template is not None:
            try:
                self._tool_template = Path(tool_template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"tool_chat_template: cannot read {tool_template}: {error}.") from error
        used = self._tool_template or str(processor.chat_template or "")
        if parser is not None and not TOOLS_WORD.search(used):
            whose = "tool_chat_template" if tool_template is not None else "The model's chat template"
            raise ConfigError(
                f"{whose} has no place for tools, although tool_call_parser is set.",
                hint="Name a file with one that has, as tool_chat_template; stage_configs/ has one for Qwen2.5-Omni.",
            )

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium. Raises `InvalidRequest` for tools that do not fit."""
        messages = [self._message(message, prompt) for message in prompt.messages]
        if not prompt.uses_tools:
            text: str = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return text
        if self._parser is None:
            raise InvalidRequest(
                "tools: this pipeline calls none, as it has no tool_call_parser.",
                hint="Its operator can set one (--tool-call-parser hermes, for models of the Qwen family).",
                field=TOOLS,
            )
        definitions = prompt.tools.definitions if prompt.tools is not None else ()
        tools = [{"type": "function", "function": function_of(definition)} for definition in definitions]
        text = self._processor.apply_chat_template(
            messages, chat_template=self._tool_template, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return text

    def _message(self, message: ChatMessage, prompt: Prompt) -> dict[str, Any]:
        content: list[Mapping[str, str]] = []
        for part in message.content:
            if part.media is None:
                content.append({"type": "text", "text": part.text or ""})
            else:
                content.append({"type": prompt.media[part.media].modality})
        if self._text_only:
            converted: dict[str, Any] = {"role": message.role, "content": "\n".join(part["text"] for part in content)}
        else:
            converted = {"role": message.role, "content": content}
        if message.tool_calls:
            converted["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            converted["tool_call_id"] = message.tool_call_id
        return converted


def _call(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: with its arguments as an object, not as JSON."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"messages: the arguments of the tool call {call.name[:64]!r} are not the JSON of an object: {error}.",
            field="messages",
        ) from error
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
