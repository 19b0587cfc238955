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


def mermaid(table: Mapping[tuple[S, E], S], initial: S) -> str:
    """Draw a table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [f"    {state.value} --> {after.value}: {event.value}" for (state, event), after in table.items()]
    ends = {after for after in table.values()} - {state for state, _ in table}
    lines += [f"    {state.value} --> [*]" for state in sorted(ends)]
    return "\n".join(lines)
