"""LoRA adapters of a stage: which there are, and what vLLM needs to run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from omni_actors.config import unknown_adapter
from omni_actors.errors import ConfigError
from omni_actors.vllm_version import Platform

CONFIG = "adapter_config.json"  # of PEFT, which wrote the adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can reserve
AT_A_TIME = 8  # adapters on the device, unless `engine.max_loras` says otherwise


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The part of an adapter's configuration that is read here."""

    r: int


def engine_arguments(adapters: Mapping[str, str], platform: Platform) -> dict[str, Any]:
    """vLLM's arguments for these adapters, folders by name; none for none.

    Raises:
        ConfigError: a folder holds no adapter, or one of a rank that vLLM does not have.
    """
    if not adapters:
        return {}
    rank = max(rank_of(name, Path(folder)) for name, folder in adapters.items())
    count = len(adapters)
    # On a CPU, vLLM runs requests without an adapter with the one in the last place, which therefore stays empty.
    places = count + 1 if platform is Platform.CPU else min(AT_A_TIME, count)
    return {
        "enable_lora": True,
        "max_loras": places,
        # Each is read once, when the stage starts: none may have to leave the host's memory for another.
        "max_cpu_loras": max(places, count),
        "max_lora_rank": next(reserved for reserved in RANKS if reserved >= rank),
    }


def rank_of(name: str, folder: Path) -> int:
    """The rank of the adapter in a folder. Raises `ConfigError` for one that vLLM cannot run."""
    try:
        rank = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_AdapterConfig).r
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"adapters.{name}: {folder} holds no LoRA adapter: {error}.",
            hint=f"Name the folder with {CONFIG} and adapter_model.safetensors.",
        ) from error
    if not 1 <= rank <= RANKS[-1]:
        raise ConfigError(f"adapters.{name}: its rank is {rank}; vLLM runs ranks from 1 to {RANKS[-1]}.")
    return rank


class LoraAdapters:
    """The adapters of a stage by name. vLLM knows an adapter by number, and its prefix cache by name and folder."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._requests = {
            name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), 1)
        }

    def all(self) -> list[LoRARequest]:
        """What vLLM loads when the stage starts."""
        return list(self._requests.values())

    def request(self, name: str | None) -> LoRARequest | None:
        """What vLLM needs to run an adapter; `None` for the model alone. Raises `InvalidRequest` for an unknown one."""
        if name is None:
            return None
        if name not in self._requests:
            raise unknown_adapter(name, self._requests)
        return self._requests[name]
