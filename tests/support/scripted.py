"""What a scripted stage is asked to say; the stage is in `scripted_stage.py`, which takes long to import."""

from __future__ import annotations

import json
from pathlib import Path

SAY = "Say: "  # a message of this beginning is answered with its rest; SHOW with the prompt as the model gets it
SHOW = "Show the prompt."
NEXT = "|"  # between the answers to spoken turns, in the instructions


def called(name: str, **arguments: str) -> str:
    """A call, as the model says it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_pipeline(checkpoint: Path) -> dict[str, object]:
    """The configuration of a pipeline whose first stage is scripted, and whose others echo what it says."""
    return {
        "name": "scripted",
        "model": str(checkpoint),
        "tool_call_parser": "hermes",
        "stages": [
            {
                "name": "thinker",
                "kind": "custom",
                "engine_class": "tests.support.scripted_stage.ScriptedStage",
                "outputs": ["text"],
            },
            {"name": "talker", "kind": "echo", "inputs": {"from": "thinker"}},
            {"name": "code2wav", "kind": "echo", "inputs": {"from": "talker"}, "outputs": ["audio"]},
        ],
    }
