"""Tools that a model may call: their definitions on the way in, the calls on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import Scalar

TOOLS = "tools"  # name of a request's tools among the lists that the prompt stage sends
MAX_TOOLS = 128
MAX_CALLS = 128  # in one message

CallId = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(max_length=256)]
Json = Annotated[str, Meta(max_length=1 << 20)]


class Tools(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tools of a request.

    Args:
        definitions: of each function the JSON of `{"name": ..., "description": ..., "parameters": SCHEMA}`.
        choice: whether the model may call them, must call one, or must not.
        name: the only function that it may call.
        parallel: whether one answer may call several.
    """

    definitions: Annotated[tuple[Json, ...], Meta(min_length=1, max_length=MAX_TOOLS)]
    choice: Literal["auto", "none", "required"] = "auto"
    name: ToolName | None = None
    parallel: bool = True

    def packed(self) -> list[Scalar]:
        """Return these tools as a list that a stage can send to another one, under the name `TOOLS`."""
        return [msgspec.json.encode(self).decode()]

    @classmethod
    def unpacked(cls, values: Sequence[Scalar]) -> Tools:
        """Reverse `packed`. Raises `InvalidPayload`."""
        try:
            return msgspec.json.decode(str(values[0]), type=cls)
        except (msgspec.MsgspecError, IndexError) as error:
            raise InvalidPayload(f"The tools of the request cannot be read: {error}.") from error


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of an earlier answer. `arguments` is the JSON of an object."""

    id: CallId
    name: ToolName
    arguments: Json


class ToolCallPiece(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The next piece of a call: first its id and name, then its arguments bit by bit. `index` numbers the calls."""

    index: Annotated[int, Meta(ge=0, le=1023)]
    id: CallId = ""
    name: ToolName = ""
    arguments: Json = ""


class CollectedCalls:
    """Puts the pieces of calls together."""

    def __init__(self) -> None:
        self._calls: dict[int, list[ToolCallPiece]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, pieces: Sequence[ToolCallPiece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            self._calls.setdefault(piece.index, []).append(piece)

    def whole(self) -> list[ToolCall]:
        """The calls so far, in order."""
        return [
            ToolCall(
                id="".join(piece.id for piece in pieces),
                name="".join(piece.name for piece in pieces),
                arguments="".join(piece.arguments for piece in pieces),
            )
            for _, pieces in sorted(self._calls.items())
        ]


def function_of(definition: str) -> dict[str, Any]:
    """The function that a definition describes. Raises `InvalidRequest` if it is not the JSON of an object."""
    try:
        function = msgspec.json.decode(definition)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"tools: a definition is not valid JSON: {error}.", field=TOOLS) from error
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("tools: a definition must be an object with a name.", field=TOOLS)
    return function
