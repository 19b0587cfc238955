"""Where what was spoken lies."""

from __future__ import annotations

from pathlib import Path

from tools.speaker.errors import SpeakerError


def files_of(work: Path, kind: str, *, needed: bool = True) -> list[Path]:
    """Returns the files of one kind in order. Raises SpeakerError if there are none that are needed."""
    found = sorted((work / "spoken").glob(f"{kind}_*.npz"))
    if needed and not found:
        raise SpeakerError(f"{work} holds no {kind}; run python -m tools.speaker speak {work}.")
    return found
