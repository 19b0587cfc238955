"""Writes the state machines in docs/architecture.md from the transition tables in the code."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path

from omni_actors.coordinator.core import replicas
from omni_actors.stage.attempts import ATTEMPT_TRANSITIONS, AttemptState

TARGET = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- written by scripts/state_diagrams.py -->\n", "<!-- end of what is written -->\n"


def document() -> str:
    """Return the text that the page should have."""
    head, _, rest = TARGET.read_text().partition(BEGIN)
    return f"{head}{BEGIN}{diagrams()}{END}{rest.partition(END)[2]}"


def mermaid(table: Mapping[tuple[enum.StrEnum, str], enum.StrEnum], initial: enum.StrEnum) -> str:
    """Draw a table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [f"    {state.value} --> {after.value}: {event}" for (state, event), after in table.items()]
    ends = {after for after in table.values()} - {state for state, _ in table}
    lines += [f"    {state.value} --> [*]" for state in sorted(ends)]
    return "\n".join(lines)


def diagrams() -> str:
    """Return the section about the state machines."""
    return f"""
## State machines

Written by `scripts/state_diagrams.py` from the tables in `omni_actors/coordinator/core/replicas.py` and
`omni_actors/stage/attempts.py`; a test compares them.

### A replica

Every process of a replica has a new epoch. Ready and draining replicas hold requests, the others hold none.

```mermaid
{mermaid(replicas.REPLICA_TRANSITIONS, replicas.ReplicaState.STARTING)}
```

### A node

A node that comes back keeps the processes that still run there.

```mermaid
{mermaid(replicas.NODE_TRANSITIONS, replicas.NodeState.EXPECTED)}
```

### The launch

```mermaid
{mermaid(replicas.LAUNCH_TRANSITIONS, replicas.LaunchState.STARTING)}
```

### A request, in the coordinator

Each way from `running` back to `waiting` is a new attempt. Each of the two ends sends the client exactly one message.

```mermaid
{mermaid(replicas.REQUEST_TRANSITIONS, replicas.RequestState.WAITING)}
```

### An attempt at a request, in one stage

The engine has it while it is `running` or `input_complete`. `finished` keeps the output until the request has ended
in every stage.

```mermaid
{mermaid(ATTEMPT_TRANSITIONS, AttemptState.OPEN)}
```

"""


if __name__ == "__main__":
    TARGET.write_text(document())
