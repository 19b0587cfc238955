"""The configurations that come with the package, found by name: `qwen2_5_omni` for `qwen2_5_omni.yaml`."""

from __future__ import annotations

from pathlib import Path

from omni_actors.errors import ConfigError, suggest

FOLDER = Path(__file__).resolve().parents[1] / "stage_configs"
SUFFIX = ".yaml"


def shipped() -> list[str]:
    """Names of the configurations, sorted."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def find_config(given: str | Path) -> Path:
    """Return the file that a path or a name stands for; a file or folder of that path comes first.

    Raises:
        ConfigError: there is neither a file nor a configuration of that name.
    """
    path = Path(given)
    if "\0" in str(given):
        raise ConfigError(f"Cannot read the pipeline file {str(given)!r}: the name holds a NUL character.")
    try:
        if path.exists():
            return path
    except OSError as error:  # the name is too long
        raise ConfigError(f"Cannot read the pipeline file {path}: {error.strerror}.") from error
    name = path.name.removesuffix(SUFFIX)
    if name in shipped() and str(path.parent) in (".", "stage_configs"):
        return FOLDER.resolve() / f"{name}{SUFFIX}"
    raise ConfigError(
        f"Cannot read the pipeline file {path}: No such file or directory.{suggest(name, shipped())}",
        hint=f"Give a file, or the name of a configuration that comes with omni_actors: {', '.join(shipped())}.",
    )
