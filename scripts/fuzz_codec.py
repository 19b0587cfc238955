"""Fuzzes the codec, guided by coverage (atheris): it may raise only its two errors; what it accepts must round-trip.

    pip install -e .[fuzz]
    python scripts/fuzz_codec.py -runs=2000000 [-max_len=4096] [corpus folder]

The input is one channel byte and frames, each preceded by a two-byte length. Golden messages are the seeds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

with atheris.instrument_imports(include=["omni_actors"]):
    from omni_actors.protocol.codec import BadBody, BadHeader, Decoder, encode
    from omni_actors.protocol.fields import Block, Header, Limits
    from omni_actors.protocol.messages import (
        ClientToCoordinator,
        CoordinatorToClient,
        CoordinatorToNode,
        CoordinatorToStage,
        FromStage,
        IntoStage,
        NodeToCoordinator,
        StageToCoordinator,
    )

LIMITS = Limits(header_bytes=512, body_bytes=2048, buffers=8, buffer_bytes=1024, message_bytes=2048)
CHANNELS = [
    ClientToCoordinator,
    CoordinatorToClient,
    IntoStage,
    FromStage,
    StageToCoordinator,
    CoordinatorToStage,
    NodeToCoordinator,
    CoordinatorToNode,
]
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "unit" / "golden_messages.json"


def open_block(header: Header, block: Block) -> memoryview:
    return memoryview(bytes(min(block.length, 4096)))


DECODERS = [Decoder(channel, LIMITS, open_block) for channel in CHANNELS]


def frames_of(data: bytes) -> list[bytes]:
    frames = []
    while data:
        size = int.from_bytes(data[:2], "little") % 4096
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return frames


def one(data: bytes) -> None:
    if not data:
        return
    decoder = DECODERS[data[0] % len(DECODERS)]
    try:
        envelope = decoder.decode(frames_of(data[1:]))
    except (BadHeader, BadBody):
        return
    again = decoder.decode(encode(envelope.header, envelope.body, envelope.buffers, LIMITS))
    if repr(again.body) != repr(envelope.body) or list(map(bytes, again.buffers)) != list(map(bytes, envelope.buffers)):
        raise RuntimeError(f"another message after a round trip: {envelope.body} {again.body}")


def write_seeds(folder: Path) -> None:
    for name, frames in json.loads(GOLDEN.read_text())["frames"].items():
        packed = b"".join(len(bytes.fromhex(f)).to_bytes(2, "little") + bytes.fromhex(f) for f in frames)
        for channel in range(len(CHANNELS)):
            (folder / f"{name.replace(' ', '-')}-{channel}").write_bytes(bytes([channel]) + packed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fc-") as seeds:
        write_seeds(Path(seeds))
        atheris.Setup([*sys.argv, seeds], one)
        atheris.Fuzz()
