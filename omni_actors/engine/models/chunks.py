"""Where an utterance is cut, so that decoding can begin before it is complete: arithmetic in blocks of the vocoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_actors.errors import ConfigError

MAX_BLOCKS = 1024
PRECISIONS = ("auto", "float32", "tf32", "bf16")


@dataclass(frozen=True)
class ChunkPolicy:
    """Chunk lengths in blocks: small at first, then each as long as all before it together, up to a limit.

    A chunk comes without a gap if it is made while all before it is heard; that it is not longer than what is heard
    leaves half of the time for it even if the talker is only twice as fast as speech (docs/benchmarks.md).

    The boundaries depend on nothing but this policy, never on when tokens arrive, so that a seed gives one waveform.

    Args:
        first: blocks of the first chunk; the first sound waits for them and for the look-ahead.
        largest: blocks of the longest chunk. Longer chunks cost less (each computes its look-ahead) but come later.
        look_ahead: blocks behind a chunk that are computed with it and thrown away.

    Raises:
        ConfigError: a number out of range.
    """

    first: int = 1
    largest: int = 8
    look_ahead: int = 1

    def __post_init__(self) -> None:
        for name, least in (("first", 1), ("largest", 1), ("look_ahead", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_BLOCKS:
                limits = f"{least}..{MAX_BLOCKS}"
                raise ConfigError(f"decode.{name}_blocks must be a whole number in {limits}; got {value!r}.")
        if self.largest < self.first:
            raise ConfigError(
                f"decode.largest_blocks ({self.largest}) is less than decode.first_blocks ({self.first}).",
                hint="Raise largest_blocks or lower first_blocks.",
            )

    def end(self, begin: int) -> int:
        """End (exclusive) of the chunk that begins at block `begin`."""
        return begin + min(self.largest, max(self.first, begin))


@dataclass(frozen=True)
class DecodeOptions:
    """How a diffusion stage decodes.

    Args:
        policy: None for whole utterances.
        precision: one of `PRECISIONS`.
        solver: one of those that the model has; empty if it has none.
    """

    policy: ChunkPolicy | None
    precision: str = "auto"
    solver: str = ""

    @classmethod
    def from_mapping(
        cls, options: Mapping[str, Any], default: ChunkPolicy, solvers: Sequence[str] = ()
    ) -> DecodeOptions:
        """Options from the configuration; those not given come from the model: its policy and its first solver."""
        precision = options.get("precision") or "auto"
        if precision not in PRECISIONS:
            raise ConfigError(f"decode.precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}.")
        solver = options.get("solver") or (solvers[0] if solvers else "")
        if solver and not solvers:
            raise ConfigError(f"decode.solver is {solver!r}, but this model has no flow to solve; remove it.")
        if solver and solver not in solvers:
            raise ConfigError(f"decode.solver is {solver!r}; it must be one of {', '.join(solvers)}.")
        name = options.get("policy") or "chunks"
        if name not in ("chunks", "whole"):
            raise ConfigError(f"decode.policy is {name!r}; it must be 'chunks' or 'whole'.")
        named = {field: options.get(f"{field}_blocks") for field in ("first", "largest", "look_ahead")}
        given = {field: value for field, value in named.items() if value is not None}
        if name == "whole":
            if given:
                names = ", ".join(f"{field}_blocks" for field in given)
                raise ConfigError(f"decode.policy 'whole' has no chunks; remove {names}.")
            return cls(None, precision, solver)
        values = {field: given.get(field, getattr(default, field)) for field in ("first", "largest", "look_ahead")}
        if "largest" not in given:  # a long first chunk raises the limit
            values["largest"] = max(values["largest"], values["first"])
        return cls(ChunkPolicy(**values), precision, solver)
