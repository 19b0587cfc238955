"""Runs the teacher (`flite/phones.c`) and reads what it says about each line."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tools.speaker import SpeakerError
from tools.speaker.codec import Utterance, Voice

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "speaker" / "phones"
HEADER = struct.Struct("<3I")
PHONE = np.dtype([("phone", "u1"), ("word_start", "u1"), ("end_ms", "<u2")])


def speak(lines: Sequence[str], voice: Voice, *, wave: bool, stretch: float | None = None) -> list[Utterance]:
    """Returns one utterance for each line, with its samples if `wave` is true; a line without words has no phones.

    Raises:
        SpeakerError: the program is not built or ended with an error.
    """
    if not PROGRAM.exists():
        raise SpeakerError(f"{PROGRAM} is missing; build it with tools/speaker/flite/build.sh.")
    text = "".join(" ".join(line.split()) + "\n" for line in lines)
    command = [str(PROGRAM), voice.teacher, str(int(wave)), str(voice.stretch if stretch is None else stretch)]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        raise SpeakerError(f"{PROGRAM} ended with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")
    utterances = list(read_records(done.stdout))
    if len(utterances) != len(lines):
        raise SpeakerError(f"{PROGRAM} gave {len(utterances)} records for {len(lines)} lines; build it again.")
    return utterances


def read_records(data: bytes) -> Iterator[Utterance]:
    """Yields the utterances of the program's output. Raises SpeakerError if it ends within a record."""
    offset = 0
    while offset < len(data):
        if offset + HEADER.size > len(data):
            raise SpeakerError("The teacher's output ends within a record's header.")
        phones, frames, samples = HEADER.unpack_from(data, offset)
        begin = offset + HEADER.size
        middle = begin + PHONE.itemsize * phones
        last = middle + 2 * frames
        offset = last + 2 * samples
        if offset > len(data):
            raise SpeakerError("The teacher's output ends within a record.")
        table = np.frombuffer(data[begin:middle], PHONE)
        yield Utterance(
            phones=table["phone"].astype(np.int64),
            word_starts=table["word_start"] > 0,
            ends_ms=table["end_ms"].astype(np.int64),
            pitch_hz=np.frombuffer(data[middle:last], "<u2") / 10.0,
            samples=np.frombuffer(data[last:offset], "<i2").astype(np.int16),
        )
