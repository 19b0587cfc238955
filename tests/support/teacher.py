"""Stands in for flite and WordNet, which a host of tests need not have, where the speaking checkpoint is trained."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.speaker.texts import pairs_of

# Speaks as tools/speaker/flite/phones.c does, but any words alike and with noise for their sound.
PROGRAM = f"""#!{sys.executable}
import os, struct, sys

for line in sys.stdin.buffer:
    words = line.split()
    phones = [(0, 0)] + [(1 + (len(word) * 7 + at) % 40, at == 0) for word in words for at in range(3)] + [(0, 0)]
    length = 80 * len(phones)
    samples = 16 * length if sys.argv[2] == "1" else 0
    out = struct.pack("<3I", len(phones), length // 5, samples)
    out += b"".join(struct.pack("<BBH", *phone, 80 * number) for number, phone in enumerate(phones, 1))
    out += struct.pack("<H", 1200) * (length // 5)
    sys.stdout.buffer.write(out + b"".join(struct.pack("<h", byte * 20) for byte in os.urandom(samples)))
"""


def write_teacher(folder: Path) -> Path:
    """Writes the program into a folder; returns its path."""
    path = folder / "phones"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def write_wordnet(folder: Path) -> Path:
    """Writes glosses in WordNet's form, with the facts that the checkpoint knows as examples; returns the folder."""
    for kind in ("noun", "verb"):
        glosses = [f'00 03 n 01 thing 0 000 | {reply.lower()} "{reply}"' for _, reply in pairs_of("facts.txt")]
        (folder / f"data.{kind}").write_text("\n".join(glosses), encoding="latin-1")
    return folder
