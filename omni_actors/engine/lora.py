"""LoRA adapters of a stage: which there are, and what vLLM needs to run them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from omni_actors.config import unknown_adapter
from omni_actors.errors import ConfigError
from omni_actors.protocol.adapters import MAX_ADAPTERS, Adapter
from omni_actors.vllm_version import Platform

CONFIG = "adapter_config.json"  # of PEFT, which wrote the adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can reserve
LATER_RANK = 64  # of adapters that come while the stage runs, unless `engine.max_lora_rank` says otherwise
LATER_ADAPTERS = 2 * MAX_ADAPTERS  # in the host's memory: those of the pipeline, and as many that still finish requests
LINGER_STEPS = 8  # for which an adapter stays after its last request, as a step that was begun may still name it
AT_A_TIME = 8  # adapters on the device, unless `engine.max_loras` says otherwise


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The part of an adapter's configuration that is read here."""

    r: int


def engine_arguments(adapters: Mapping[str, str], platform: Platform, *, more_later: bool = False) -> dict[str, Any]:
    """vLLM's arguments for these adapters, folders by name; none for none.

    Args:
        more_later: whether operators may load others while the stage runs.

    Raises:
        ConfigError: a folder holds no adapter, or one of a rank that vLLM does not have.
    """
    if not adapters and not more_later:
        return {}
    ranks = [rank_of(name, Path(folder)) for name, folder in adapters.items()]
    rank = max([*ranks, LATER_RANK] if more_later else ranks)
    # On a CPU, vLLM runs requests without an adapter with the one in the last place, which therefore stays empty.
    count = max(len(adapters), AT_A_TIME) if more_later else len(adapters)
    places = count + 1 if platform is Platform.CPU else min(AT_A_TIME, count)
    return {
        "enable_lora": True,
        "max_loras": places,
        # Each is read once, when it is loaded: none may have to leave the host's memory for another.
        "max_cpu_loras": LATER_ADAPTERS if more_later and platform is not Platform.CPU else max(places, count),
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
    """The adapters of a stage: those of the YAML by name, and those that come and go while it runs by version.

    vLLM knows an adapter by number, and its prefix cache by name and folder; both are different for each version.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._requests = {
            name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), 1)
        }
        self._numbers = itertools.count(len(folders) + 1)
        self._later: dict[int, LoRARequest] = {}
        self._leaving: dict[int, int] = {}  # versions, with the steps for which they still linger

    def all(self) -> list[LoRARequest]:
        """What vLLM loads when the stage starts."""
        return list(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests) + len(self._later)

    def add(self, adapter: Adapter) -> LoRARequest | None:
        """Take an adapter; returns what vLLM has to load, `None` if it has."""
        if adapter.version in self._later:
            return None
        name = f"{adapter.name}@{adapter.version}"
        self._later[adapter.version] = request = LoRARequest(name, next(self._numbers), adapter.folder)
        return request

    def leave(self, version: int) -> None:
        """Forget an adapter as soon as no request needs it."""
        if version in self._later:
            self._leaving[version] = LINGER_STEPS

    def remove(self, version: int) -> None:
        """Forget an adapter now."""
        self._later.pop(version, None)
        self._leaving.pop(version, None)

    def gone(self, needed: Collection[int], idle: bool) -> list[int]:
        """Forget those that may go, and return their numbers. Call it after each step and for each that leaves.

        Args:
            needed: versions that requests run with.
            idle: no step is under way or will be.
        """
        numbers = []
        for version in list(self._leaving):
            if version in needed:
                self._leaving[version] = LINGER_STEPS
                continue
            self._leaving[version] -= 1
            if idle or self._leaving[version] <= 0:
                numbers.append(self._later[version].lora_int_id)
                self.remove(version)
        return numbers

    def request(self, name: str | None, later: Adapter | None = None) -> LoRARequest | None:
        """What vLLM needs to run an adapter; `None` for the model alone. Raises `InvalidRequest` for an unknown one."""
        if name is None:
            return None
        found = self._later.get(later.version) if later is not None else self._requests.get(name)
        if found is None:
            raise unknown_adapter(name, self._requests)
        return found
