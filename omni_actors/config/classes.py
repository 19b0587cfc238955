"""Names of modules and classes in the YAML: only from allowed prefixes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from omni_actors import envs
from omni_actors.config.dotted_keys import suggest
from omni_actors.config.schema import BUILT_IN_IMPORT_PREFIXES
from omni_actors.errors import ConfigError


def check_importable(name: str, where: str) -> None:
    """A dotted `name` must begin with an allowed prefix; plain names are looked up in a registry later."""
    if "." in name:
        check_allowed(name, where)


def check_allowed(name: str, where: str) -> None:
    """Raise `ConfigError` unless a module, or a class in one, lies below an allowed prefix (in whole words)."""
    allowed = BUILT_IN_IMPORT_PREFIXES + envs.allowed_import_prefixes()
    if not any(f"{name}.".startswith(f"{prefix.rstrip('.')}.") for prefix in allowed):
        raise ConfigError(
            f"{where}: {name!r} is outside the allowed import prefixes {list(allowed)}.",
            hint="Only code that you trust may be named; add its prefix to OMNI_ACTORS_ALLOW_IMPORTS.",
        )


def resolve_class(name: str, registry: Mapping[str, type], base: type, where: str) -> type:
    """The class that `name` stands for, from `registry` or an allowed dotted path.

    Raises:
        ConfigError: unknown name, forbidden prefix, or no subclass of `base`.
    """
    if "." not in name:
        if name not in registry:
            raise ConfigError(f"{where}: unknown name {name!r}.{suggest(name, registry)}")
        return registry[name]
    check_importable(name, where)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{where}: {name!r} is no subclass of {base.__name__}.")
    return found
