"""Carries out the coordinator's orders about LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from omni_actors.config.checks import allowed_folder
from omni_actors.errors import OmniError
from omni_actors.logs import get_logger
from omni_actors.protocol.adapters import AdapterLoaded, LoadAdapter
from omni_actors.stage.engine_interface import StageEngine

logger = get_logger(__name__)

PROBLEM_CHARACTERS = 4096


def load(engine: StageEngine, order: LoadAdapter, folders: Sequence[str]) -> AdapterLoaded:
    """Load an adapter from one of `folders`; the answer says whether that went well."""
    adapter = order.adapter
    try:
        folder = allowed_folder(adapter.folder, folders)
        engine.load_adapter(msgspec.structs.replace(adapter, folder=str(folder)))
    except OmniError as error:
        logger.warning("the adapter %s cannot be loaded: %s", adapter.name, error)
        return AdapterLoaded(adapter.version, str(error)[:PROBLEM_CHARACTERS])
    logger.info("loaded the adapter %s", adapter.name)
    return AdapterLoaded(adapter.version)
