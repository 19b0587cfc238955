"""Tools of a session: their definitions, and the items of their calls and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from omni_actors.errors import suggest
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.schema_fields import Strict, Text
from omni_actors.protocol.tools import MAX_TOOLS, ToolName


class FunctionTool(Strict, frozen=True, tag_field="type", tag="function"):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}\Z")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None

    def definition(self) -> dict[str, Any]:
        """The function as the client library takes it."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in given.items() if value is not None}


class NamedTool(Strict, frozen=True):
    """A choice of one tool."""

    type: Literal["function"]
    name: ToolName


ToolList = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["auto", "none", "required"] | NamedTool


def check_choice(tools: Sequence[FunctionTool], choice: ToolChoice, where: str) -> None:
    """Raise `HttpError` 400 if `choice` asks for what `tools` do not have."""
    if isinstance(choice, NamedTool):
        known = [tool.name for tool in tools]
        if choice.name not in known:
            message = f"There is no tool {choice.name[:64]!r}.{suggest(choice.name[:64], known)}"
            raise bad_field(f"{where}.tool_choice.name", message)
    elif choice == "required" and not tools:
        raise bad_field(f"{where}.tool_choice", "There are no tools of which one could be called.")


def tool_options(tools: Sequence[FunctionTool], choice: ToolChoice, parallel: bool | None) -> dict[str, Any]:
    """The tools of a prompt, as the client library takes them; empty without tools."""
    if not tools:
        return {}
    return {
        "tools": [tool.definition() for tool in tools],
        "tool_choice": {"name": choice.name} if isinstance(choice, NamedTool) else choice,
        "parallel_tool_calls": parallel,
    }
