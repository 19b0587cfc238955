"""Describes a release of vLLM in the terms of `vllm_contract.py`: the installed one in this process, or another one.

`describe` runs in a process of its own, in which the release is the first one on the path: its Python files are enough,
neither its extensions nor its dependencies have to fit this machine.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from enum import EnumMeta
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.engine.platform import prepare
from tests.support.paths import REPOSITORY
from tests.support.vllm_contract import CALLED, CONTAINS, OURS, READ, Own, Release

RECORDED = REPOSITORY / "tests" / "unit" / "vllm_releases"
DESCRIBE_SECONDS = 600


def recorded() -> list[Path]:
    """The recorded releases."""
    return sorted(RECORDED.glob("*.json"))


def describe(vllm: Path) -> tuple[Release, Own]:
    """Describe the release in `vllm`, a wheel or a folder with the package."""
    if vllm.suffix == ".whl":
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(vllm) as wheel:
            wanted = [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name]
            wheel.extractall(folder, wanted)
            return describe(Path(folder))
    path = [str(vllm), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        subprocess.run(
            [sys.executable, "-m", __name__, answer.name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "VLLM_LOGGING_LEVEL": "ERROR"},
            cwd=REPOSITORY,
            check=True,
            timeout=DESCRIBE_SECONDS,
        )
        return msgspec.json.decode(Path(answer.name).read_bytes(), type=tuple[Release, Own])


def describe_imported() -> tuple[Release, Own]:
    """Describe the release that this process imports."""
    prepare()  # must precede vLLM
    import vllm

    kinds = {name.partition(":")[2]: find(name) for name in OURS}
    bases = {name: [base for base in kind.__mro__ if is_theirs(base)] for name, kind in kinds.items()}
    release = Release(
        version=vllm.__version__,
        callables={name: called_part(found, CALLED[name]) for name in CALLED if (found := find(name)) is not None},
        fields={name: sorted(set(fields_of(find(name))) & set(READ[name].split())) for name in READ},
        contains={name: phrases_in(find(name), CONTAINS[name]) for name in CONTAINS},
        bases={name: list(map(full_name, found)) for name, found in bases.items()},
        methods={full_name(base): methods_of(base) for found in bases.values() for base in found},
        abstract={name: left for name, found in bases.items() if (left := sorted(open_methods(found)))},
    )
    own: Own = {}
    for name, kind in kinds.items():
        own[name] = {}
        for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("omni_actors.")]):
            own[name] |= methods_of(base)
    return release, own


def find(name: str) -> Any:
    """The object called `module:attribute`; None if there is none."""
    module, _, attributes = name.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = inspect.getattr_static(found, attribute)
    except (ModuleNotFoundError, AttributeError):
        return None
    return found


def signature_of(function: Any) -> str:
    """The parameters that a caller gives: `self` and `cls` are left out."""
    function = getattr(function, "__func__", function)  # of a class method or a static method
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return " ".join(
        f"{marks.get(item.kind, '')}{name}{'' if item.default is item.empty else '='}"
        for name, item in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    )


def called_part(function: Any, passed: str) -> str:
    """The part of a signature that decides whether it takes our call: our arguments, and those that it needs."""
    ours = passed.split()
    return " ".join(item for item in signature_of(function).split() if item.rstrip("=") in ours or item[-1] != "=")


def fields_of(kind: Any) -> Iterator[str]:
    """Fields of a struct, dataclass or named tuple; members of an enumeration."""
    if isinstance(kind, EnumMeta):
        yield from kind.__members__
    elif dataclasses.is_dataclass(kind):
        yield from (field.name for field in dataclasses.fields(kind))
    else:
        yield from getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))


def phrases_in(function: Any, phrases: set[str] | list[str]) -> list[str]:
    """Those of the phrases that occur in the source, in the order of their first occurrence."""
    source = inspect.getsource(function) if function is not None else ""
    return sorted((phrase for phrase in phrases if phrase in source), key=source.index)


def is_theirs(kind: type) -> bool:
    return kind.__module__.startswith("vllm.")


def full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def methods_of(kind: type) -> dict[str, str]:
    """The methods that a class itself defines, with their signatures; no special ones."""
    return {
        name: signature_of(value)
        for name, value in vars(kind).items()
        if not name.startswith("__") and inspect.isfunction(getattr(value, "__func__", value))
    }


def open_methods(bases: list[type]) -> Iterator[str]:
    """Abstract methods of these bases that none of them defines."""
    for method in {name for base in bases for name in getattr(base, "__abstractmethods__", ())}:
        first = next(vars(base)[method] for base in bases if method in vars(base))
        if getattr(first, "__isabstractmethod__", False):
            yield method


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(describe_imported()))
