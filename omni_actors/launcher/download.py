"""What a start has to download first: said before it begins, and refused where it cannot work."""

from __future__ import annotations

import importlib.util
import os
import shutil
import urllib.request
from pathlib import Path

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.config.checkpoint import CONFIG_NAME, models_of
from omni_actors.errors import ConfigError

ASK_SECONDS = 5.0
GIB = float(1 << 30)


def pending_download(pipeline: PipelineConfig) -> str:
    """A line on the downloads that the models need; "" if each is a folder, or in the cache, or comes from elsewhere.

    Raises:
        ConfigError: a model is not here and may not be downloaded, or the disk has too little room for all of them.
    """
    models = [model for model in models_of(pipeline) if not Path(model).is_dir()]
    if not models or importlib.util.find_spec("huggingface_hub") is None or _from_elsewhere():
        return ""
    from huggingface_hub import constants, try_to_load_from_cache

    models = [model for model in models if not isinstance(try_to_load_from_cache(model, CONFIG_NAME), str)]
    if not models:
        return ""
    cache = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{models[0]} is neither a folder nor in the cache {cache}, and HF_HUB_OFFLINE forbids to download it.",
            hint="Download it first (hf download), give --model FOLDER, or unset HF_HUB_OFFLINE.",
        )
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    sizes = [_size(f"{constants.ENDPOINT}/api/models/{model}?blobs=true") for model in models]
    size, names = sum(sizes), " and ".join(models)
    if size > free:
        raise ConfigError(
            f"{names} {'has' if len(models) == 1 else 'have'} {size / GIB:.1f} GiB, and {cache} has room for "
            f"{free / GIB:.1f} GiB.",
            hint="Make room, or set HF_HOME to a folder on a larger disk.",
        )
    known = f"{size / GIB:.1f} GiB" if all(sizes) else "of unknown size"
    verb = "is" if len(models) == 1 else "are"
    return f"{names} {verb} downloaded first ({known}, to {cache}, where {free / GIB:.0f} GiB are free)"


def _from_elsewhere() -> bool:
    return os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")


def _size(url: str) -> int:
    """Bytes of a model's files, as the hub describes them at `url`; 0 if it does not."""
    # By hand: the errors of huggingface_hub are those of its HTTP library, which differs between its releases.
    try:
        with urllib.request.urlopen(url, timeout=ASK_SECONDS) as answer:
            return sum(file.size or 0 for file in msgspec.json.decode(answer.read(), type=_Model).siblings)
    except (OSError, ValueError, msgspec.DecodeError):  # no network, no such model, or one that needs a login
        return 0


class _File(msgspec.Struct):
    size: int | None = None


class _Model(msgspec.Struct):
    siblings: list[_File] = []
