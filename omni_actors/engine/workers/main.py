"""What a worker process of a stage imports before vLLM: prepares it as the stage's own process was prepared."""

from __future__ import annotations

from omni_actors.engine.platform import prepare

prepare()
