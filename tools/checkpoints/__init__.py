"""Writes checkpoints without a network: tiny ones that run, and full-sized ones without weights.

    python -m tools.checkpoints tiny|tiny-FAMILY OUT_DIR [--seed N]
    python -m tools.checkpoints full|full-FAMILY OUT_DIR

`--help` lists the families, and that of a kind its other flags.

`tiny` has the real architecture at toy size and random weights, scaled so that the outputs are useful in tests: greedy
tokens vary with the prompt and do not fall into a cycle, the waveform has amplitude and is not clipped
(docs/decisions.md).

`full` has the published sizes of Qwen2.5-Omni-7B and no weights; vLLM fills it with `load_format: dummy`.

The others are the same for Qwen3-Omni, for the three kinds of Qwen3-TTS, for Qwen3-ASR, for Z-Image and for
Qwen-Image-2.1; those of pictures need the extra `image`. All use the layout of the published checkpoint, so the same
code loads either.

A family is a table in `data/`: its tokens, its configuration, and two values, published and tiny, for each size that
differs (`families.py`). `omni.py`, `tts.py`, `asr.py` and `pictures.py` write the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKER_FILE = "omni_actors_checkpoint.json"


class CheckpointError(Exception):
    """A checkpoint cannot be written."""


class FolderError(CheckpointError):
    """The folder holds files that this package did not write."""


def claim_folder(folder: Path, contents: dict[str, Any]) -> None:
    """Creates the folder or takes over one that this package wrote; refuses any other that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is not a directory")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MARKER_FILE).exists():
        raise FolderError(f"{folder} is not empty and was not written by this command; name another directory")
    for old in folder.glob("*.safetensors"):
        old.unlink()  # a full checkpoint over a tiny one must not keep the weights
    write_json(folder / MARKER_FILE, contents)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as published checkpoints have them."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
