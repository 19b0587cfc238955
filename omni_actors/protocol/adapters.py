"""LoRA adapters that operators load and unload while a pipeline runs."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import Count
from omni_actors.protocol.header import Body

MAX_ADAPTERS = 256  # of a pipeline at a time, those of its YAML included
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^.\s/][^.\s]*\Z")]  # dots separate keys
Folder = Annotated[str, Meta(max_length=4096)]


class Adapter(Struct, frozen=True):
    """An adapter in a folder of each host with its stage. `version` differs each time that a name is loaded."""

    name: AdapterName
    folder: Folder
    version: Count


class AdapterAction(enum.StrEnum):
    """What an operator does with an adapter."""

    LOAD = "load"
    UNLOAD = "unload"


class ManageAdapter(Body, tag="manage_adapter", frozen=True):
    """Client -> coordinator: load the adapter in `folder` under a name, or unload the one of that name."""

    action: AdapterAction
    name: AdapterName
    folder: Folder = ""

    def __post_init__(self) -> None:
        if (self.action is AdapterAction.LOAD) != bool(self.folder):
            raise InvalidPayload("An adapter is loaded from a folder, and unloaded by its name alone.", field="folder")


class Adapters(Body, tag="adapters", frozen=True):
    """Coordinator -> client: the answer to `ManageAdapter`, once it is done: the names of all adapters."""

    names: tuple[str, ...]


class LoadAdapter(Body, tag="load_adapter", frozen=True):
    """Coordinator -> stage: load an adapter, and answer with `AdapterLoaded`."""

    adapter: Adapter


class UnloadAdapter(Body, tag="unload_adapter", frozen=True):
    """Coordinator -> stage: drop an adapter once no request runs with it."""

    version: Count


class AdapterLoaded(Body, tag="adapter_loaded", frozen=True):
    """Stage -> coordinator: an adapter is loaded, or cannot be for the reason in `problem`."""

    version: Count
    problem: Annotated[str, Meta(max_length=4096)] = ""
