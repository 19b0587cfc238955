"""Client library of a running pipeline, for any process that can reach its endpoint.

`AsyncOmniClient` is the implementation. `OmniClient` runs one in a thread for code without an event loop, and `OmniLLM`
(`client/offline.py`) starts a pipeline for itself. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from omni_actors.client.async_client import MAX_CHOICES, AsyncOmniClient
from omni_actors.client.prompts import Prompting, spoken
from omni_actors.client.streams import (
    Audio,
    ChoiceItem,
    ChoiceStreams,
    Image,
    Latents,
    Progress,
    RequestStream,
    StreamItem,
    Text,
    Video,
    WordTimes,
)
from omni_actors.client.sync_client import OmniClient, SyncRequestStream

__all__ = [
    "MAX_CHOICES",
    "AsyncOmniClient",
    "Audio",
    "ChoiceItem",
    "ChoiceStreams",
    "Image",
    "Latents",
    "OmniClient",
    "Progress",
    "Prompting",
    "RequestStream",
    "StreamItem",
    "SyncRequestStream",
    "Text",
    "Video",
    "WordTimes",
    "spoken",
]
