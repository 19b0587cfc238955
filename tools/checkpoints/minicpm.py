"""Checkpoints of MiniCPM-o 4.5."""

from __future__ import annotations

from pathlib import Path

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.s3 import TINY, write_vocoder, write_voices


def write_tiny(folder: Path, seed: int = 0) -> None:
    """Writes a tiny checkpoint. Raises FolderError."""
    claim_folder(folder, {"kind": "tiny-minicpm-o", "seed": seed})
    write_json(folder / "config.json", {"architectures": ["MiniCPMO"], "model_type": "minicpmo", "tts_config": {}})
    write_vocoder(folder / "assets" / "token2wav", TINY, seed)
    write_voices(folder / "assets")
