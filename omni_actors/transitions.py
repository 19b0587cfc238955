"""State machines as transition tables: (state, event) -> the next state. What is not in a table cannot happen."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from omni_actors.errors import ProtocolError

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state after `event`; raises `ProtocolError` for an event that has no place in `state`."""
    following = table.get((state, event))
    if following is None:
        raise ProtocolError(f"{event.value} cannot happen while {state.value}.")
    return following
