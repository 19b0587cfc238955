"""Writes docs/state-machines.md from the tables in the code."""

from __future__ import annotations

from pathlib import Path

from omni_actors.coordinator.core.states import (
    REPLICA_TRANSITIONS,
    REQUEST_TRANSITIONS,
    ReplicaState,
    RequestState,
    mermaid,
)
from omni_actors.stage.attempts import ATTEMPT_TRANSITIONS, AttemptState

TARGET = Path(__file__).resolve().parent.parent / "docs" / "state-machines.md"


def document() -> str:
    """The whole file."""
    return f"""# State machines

Written by `scripts/state_diagrams.py` from the tables in `omni_actors/coordinator/core/states.py` and
`omni_actors/stage/attempts.py`; a test compares them.

## A replica

A new life of a replica has a new epoch. Ready and draining replicas hold requests, the others hold none.

```mermaid
{mermaid(REPLICA_TRANSITIONS, ReplicaState.STARTING)}
```

## A request, in the coordinator

Each way from `running` back to `waiting` is a new attempt. The two ends are one message to the client each.

```mermaid
{mermaid(REQUEST_TRANSITIONS, RequestState.WAITING)}
```

## An attempt at a request, in one stage

The engine has it while it is `running` or `input_complete`. `finished` keeps the output until the request has ended
in every stage.

```mermaid
{mermaid(ATTEMPT_TRANSITIONS, AttemptState.OPEN)}
```
"""


if __name__ == "__main__":
    TARGET.write_text(document())
