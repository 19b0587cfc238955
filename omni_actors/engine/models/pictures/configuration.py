"""What the config.json of a part of a checkpoint says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_actors.errors import ConfigError


class PartConfig:
    """The configuration of a part of one class.

    Args:
        part: its name, for errors.
        config: the content of its config.json.
        class_name: the class of diffusers that it has to be of.

    Raises:
        ConfigError: it is of another class.
    """

    def __init__(self, part: str, config: Mapping[str, Any], class_name: str) -> None:
        self._part, self._config = part, config
        if (name := config.get("_class_name")) != class_name:
            raise ConfigError(f"The checkpoint's {part} is {name!r}, not {class_name}.")

    def expect(self, **values: Any) -> None:
        """Raise `ConfigError` if one of these keys is there with another value."""
        for key, value in values.items():
            if self._config.get(key, value) != value:
                raise ConfigError(
                    f"The checkpoint's {self._part} has {key} {self._config[key]!r}; only {value!r} is supported."
                )

    def __getitem__(self, key: str) -> Any:
        """A value. Raises `ConfigError` if it is missing."""
        try:
            return self._config[key]
        except KeyError as error:
            raise ConfigError(f"The config.json of the checkpoint's {self._part} has no {error}.") from error
