"""omni_actors serves omni-modality models: every stage is an independent vLLM process, joined to the others by ZMQ.

The names below are imported on first use, which keeps `import omni_actors` fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from omni_actors.client import AsyncOmniClient, OmniClient
    from omni_actors.client.offline import OmniLLM
    from omni_actors.client.streams import OmniRequestOutput, OmniTokensPrompt

_MODULES = {
    "AsyncOmniClient": "omni_actors.client",
    "OmniClient": "omni_actors.client",
    "OmniLLM": "omni_actors.client.offline",
    "OmniRequestOutput": "omni_actors.client.streams",
    "OmniTokensPrompt": "omni_actors.client.streams",
}

__all__ = ["AsyncOmniClient", "OmniClient", "OmniLLM", "OmniRequestOutput", "OmniTokensPrompt", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'omni_actors' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
