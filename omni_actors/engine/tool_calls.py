"""Finds the calls of tools in an answer, with vLLM's own parsers, and says which of its tokens are to be spoken."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParserManager

from omni_actors.errors import ConfigError, EngineError, InvalidRequest, suggest
from omni_actors.protocol.payloads import StructuredOutputs, ToolCallPiece, Tools, function_of


def parser_class(name: str, tokenizer: TokenizerLike) -> type[Parser]:
    """vLLM's parser of this name. Raises `ConfigError` if there is none, or not for this tokenizer."""
    if name not in (known := ToolParserManager.list_registered()):
        raise ConfigError(f"tool_call_parser: vLLM has no tool parser {name!r}.{suggest(name, known)}")
    try:
        found = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    except TypeError as error:
        raise ConfigError(f"tool_call_parser: {error}.", hint="Choose the one that fits the model.") from error
    if found is None:
        raise ConfigError(f"tool_call_parser: vLLM makes no parser of {name!r}.")
    return found


def _choice_of(tools: Tools) -> str | dict[str, Any]:
    """The choice as OpenAI writes it."""
    return {"type": "function", "function": {"name": tools.name}} if tools.name is not None else tools.choice


def _form_of(request: ChatCompletionRequest) -> StructuredOutputs | None:
    """The grammar that vLLM's parser wants for this request: a call that must be made, or one that must be strict."""
    found = request.structured_outputs
    if found is None:
        return None
    if found.structural_tag is not None:
        return StructuredOutputs(structural_tag=found.structural_tag)
    if found.json is None:
        return None
    return StructuredOutputs(
        json=found.json if isinstance(found.json, str) else msgspec.json.encode(found.json).decode()
    )


class ToolCallReader:
    """Separates one answer into text and calls.

    What follows the first call is not spoken, nor is text that may yet turn out to begin one.

    Attributes:
        form: what the text must look like for the calls to be as the request wants them; `None` for anything.

    Raises:
        InvalidRequest: vLLM refuses the definitions.
    """

    def __init__(self, parser: type[Parser], tokenizer: TokenizerLike, tools: Tools, prompt: Sequence[int]) -> None:
        functions = [{"type": "function", "function": function_of(text)} for text in tools.definitions]
        try:
            # vLLM's parsers look at the tools and at the choice; the messages are there because there must be some.
            self._request = ChatCompletionRequest(
                messages=[{"role": "user", "content": ""}],
                tools=cast(Any, functions),
                tool_choice=cast(Any, _choice_of(tools)),
                parallel_tool_calls=tools.parallel,
                seed=None,
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"])
            raise InvalidRequest(f"tools: {where}: vLLM refuses this: {first['msg']}.", field="tools") from error
        self._parser = parser(tokenizer, cast(Any, self._request.tools))
        self._request = cast(ChatCompletionRequest, self._parser.adjust_request(self._request))
        self.form = _form_of(self._request)
        if tools.choice == "required" and self.form is None:
            raise InvalidRequest(
                "tool_choice: this model's parser knows no grammar that would force a call.",
                hint="Use auto, and say it in the prompt.",
                field="tool_choice",
            )
        self._parallel = tools.parallel
        self._prompt = list(prompt)
        self._ids: dict[int, str] = {}
        self._characters = 0  # of the answer so far
        self._tokens = 0
        self._unspoken: deque[tuple[int, int]] = deque()  # tokens and characters at the end of each piece kept back
        self._passed = 0  # characters of it that are text
        self.calling = False  # whether inside a call
        self.spoken = 0  # tokens from the beginning of the answer that are text

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are left out of the text that the parser reads."""
        return bool(self._request.skip_special_tokens)

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> tuple[str, tuple[ToolCallPiece, ...]]:
        """Take the next piece of the answer; return its text and calls. Raises `EngineError` if vLLM's parser fails."""
        try:
            delta = self._parser.parse_delta(
                text, list(token_ids), self._request, prompt_token_ids=self._prompt, finished=finished
            )
        except Exception as error:  # its two dozen parsers raise anything for text they do not expect
            raise EngineError(f"vLLM's tool parser failed: {type(error).__name__}: {error}") from error
        content = (delta.content if delta is not None else None) or ""
        calls = tuple(self._piece(call) for call in (delta.tool_calls if delta is not None else None) or ())
        self._count(text, token_ids, content, bool(calls), finished)
        return content, calls if self._parallel else tuple(call for call in calls if call.index == 0)

    def _piece(self, call: Any) -> ToolCallPiece:
        name = (call.function.name if call.function is not None else None) or ""
        new = ""
        if name and call.index not in self._ids:
            new = self._ids[call.index] = call.id or f"call_{uuid.uuid4().hex[:24]}"
        arguments = (call.function.arguments if call.function is not None else None) or ""
        return ToolCallPiece(index=call.index, id=new, name=name, arguments=arguments)

    def _count(self, text: str, token_ids: Sequence[int], content: str, calls: bool, finished: bool) -> None:
        """Find the tokens that are text: those whose characters the parser has let through before any call."""
        self._tokens += len(token_ids)
        self._characters += len(text)
        self._unspoken.append((self._tokens, self._characters))
        self._passed += 0 if self.calling else len(content)
        while self._unspoken and not self.calling and self._unspoken[0][1] <= self._passed:
            self.spoken = self._unspoken.popleft()[0]
        self.calling = self.calling or calls
        if finished and not self.calling:
            self.spoken = self._tokens
        if self.calling:
            self._unspoken.clear()
