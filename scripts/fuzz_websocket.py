"""Sends broken frames to realtime, Live and speech sessions, next to events that are well-formed and that are not.

    python scripts/fuzz_websocket.py [--seconds 60] [--seed 0] [--case NUMBER]

All opcodes and reserved bits, wrong and missing masks, lengths that are wrong, not the shortest, or never reached,
messages in pieces with control frames between them, floods of small frames, codes and reasons of ends, text that is no
UTF-8, connections that are cut. What counts as a violation is what `fuzz_http.py` says; so do frames of the server that
are not valid, and 1011 as the end of a session.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fuzz_http import ACCEPTED, MARK, RAW, Case, handshake, main
from scripts.fuzz_http_requests import SOCKETS

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
CODES = [0, 999, 1000, 1001, 1004, 1005, 1006, 1008, 1015, 2999, 3000, 4999, 5000, 65535]
SIZES = [0, 1, 2, 100, 125, 126, 127, 1000, 65_535, 65_536]
LARGE = [1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]


def frame(
    opcode: int, data: bytes = b"", *, first: int = FIN, mask: bytes = bytes(4), size: int | None = None
) -> bytes:
    """A frame of a client.

    Args:
        first: the bits before the opcode.
        mask: empty for none.
        size: the length that it gives, if that is another one.
    """
    length = len(data) if size is None else size
    masked = FIN if mask else 0
    if length < 126:
        head = struct.pack(">BB", first | opcode, masked | length)
    elif length < 1 << 16:
        head = struct.pack(">BBH", first | opcode, masked | 126, length)
    else:
        head = struct.pack(">BBQ", first | opcode, masked | 127, length)
    if any(mask):
        data = bytes(byte ^ key for byte, key in zip(data, itertools.cycle(mask), strict=False))
    return head + mask + data


def frames_of_server(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Opcodes and contents of the frames in what a server has sent. Raises `ValueError` for one that is not valid."""
    while len(data) >= 2:
        head, length = data[0], data[1]
        at, form = {126: (4, ">H"), 127: (10, ">Q")}.get(length, (2, ""))
        if head & 0x70 or head & 0x0F not in (TEXT, CLOSE, PING, PONG) or not head & FIN or length > 127:
            raise ValueError(f"the server sent a frame that begins with {data[:2]!r}")
        if len(data) < at:
            return
        size = struct.unpack(form, data[2:at])[0] if form else length
        if len(data) < at + size:
            return
        yield head & 0x0F, data[at : at + size]
        data = data[at + size :]


class SessionCase(Case):
    """What the client of one session sends, repeatable by seed and number."""

    def __init__(self, seed: int, number: int) -> None:
        self.chance = random.Random(f"websocket-{seed}-{number}")
        self.name = f"case {number} of seed {seed}"
        path, first, self._events = self.chance.choice(SOCKETS)
        begins = self.chance.random() < 0.8
        parts = [frame(TEXT, json.dumps(event).encode()) for event in first if begins]
        parts += [self._part() for _ in range(self.chance.choice((1, 3, 8, 30)))]
        sent = b"".join(parts)
        if self.chance.random() < 0.2:
            sent = sent[: self.chance.randrange(len(sent) + 1)]
        early = self.chance.random() < 0.05  # before the session is accepted
        opening = handshake(path)
        self.bytes, self.frames = (opening + sent, b"") if early else (opening, sent)

    def statuses(self, received: bytes) -> list[int]:
        """The status of the handshake, and the code with which the server ended the session, if it did."""
        head, _, frames = received.partition(b"\r\n\r\n")
        found = super().statuses(head)
        if head.startswith(ACCEPTED):
            for opcode, content in frames_of_server(frames):
                if opcode == TEXT:
                    json.loads(content)
                elif opcode == CLOSE and content:
                    found.append(struct.unpack(">H", content[:2])[0])
        return found

    def _part(self) -> bytes:
        return self.chance.choice(
            (self._message,) * 12
            + (self._control,) * 3
            + (self._flood,) * 2
            + (self._close, self._odd, self._unfinished, self._broken_text, self._random)
        )()

    def _event(self) -> bytes:
        event = copy.deepcopy(self.chance.choice(self._events))
        if self.chance.random() < 0.4:
            self.change(event)
        data = json.dumps(event).encode().replace(b'"%s"' % MARK.encode(), self.chance.choice(RAW))
        return self.corrupt(data) if self.chance.random() < 0.1 else data

    def _message(self) -> bytes:
        """An event, mostly in one frame; else in pieces, some of them empty, with control frames between them."""
        data = self._event()
        cuts = sorted(self.chance.choices(range(len(data) + 1), k=self.chance.choice((0, 0, 0, 1, 3, 40))))
        pieces = [data[start:end] for start, end in itertools.pairwise((0, *cuts, len(data)))]
        made, opcode = b"", self.chance.choice((TEXT,) * 9 + (BINARY,))
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            made += frame(CONTINUATION if index else opcode, piece, first=FIN if last else 0, mask=self._mask())
            if not last and self.chance.random() < 0.2:
                made += self._control()
        return made

    def _mask(self) -> bytes:
        return self.chance.randbytes(4) if self.chance.random() < 0.3 else bytes(4)

    def _control(self) -> bytes:
        return frame(self.chance.choice((PING, PONG)), self.chance.randbytes(self.chance.choice((0, 4, 125))))

    def _flood(self) -> bytes:
        """Many small frames: of one kind, in a message or around it."""
        many = self.chance.choice((10, 300, 5000, 5000))
        small = self.chance.choice(
            (
                frame(PING),
                frame(PONG, b"x" * 125),
                frame(TEXT),
                frame(BINARY, b"{"),
                frame(TEXT, first=0) + frame(CONTINUATION),
            )
        )
        if self.chance.random() < 0.5:
            piece = frame(CONTINUATION, b" " * self.chance.choice((0, 1)), first=0)
            return frame(TEXT, b"{", first=0) + many * piece + frame(CONTINUATION, b"}")
        return many * small

    def _close(self) -> bytes:
        content = struct.pack(">H", self.chance.choice(CODES)) + self.chance.choice((b"", b"bye", b"\xff", b"x" * 123))
        return frame(CLOSE, self.chance.choice((content, b"", b"\x03", content + b"x" * 200)))

    def _odd(self) -> bytes:
        """A frame with any opcode and bits, any length, perhaps without a mask or with a length that is not its own."""
        data = self.chance.randbytes(self.chance.choice(SIZES))
        mask = b"" if self.chance.random() < 0.2 else self._mask()
        first = self.chance.choice((FIN, FIN, 0, 0xC0, 0xA0, 0x90, 0xF0))
        size = self.chance.choice((None, None, len(data) + 1, max(0, len(data) - 1), *LARGE))
        made = frame(self.chance.randrange(16), data, first=first, mask=mask, size=size)
        if len(data) < 126 and size is None and self.chance.random() < 0.3:  # a length that is longer than it need be
            made = made[:1] + bytes([made[1] & FIN | 127]) + struct.pack(">Q", len(data)) + made[2:]
        return made

    def _unfinished(self) -> bytes:
        """The beginning of a message that never ends."""
        piece = b"x" * self.chance.choice((0, 1, 5000, 300_000))
        if self.chance.random() < 0.5:
            return frame(TEXT, piece, size=len(piece) + 1_000_000)
        return frame(TEXT, piece, first=0) + frame(CONTINUATION, piece, first=0)

    def _broken_text(self) -> bytes:
        data = self.chance.choice((b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xc0\xaf", "é".encode()[:1]))
        return (
            frame(TEXT, b"{", first=0) + frame(CONTINUATION, data) if self.chance.random() < 0.5 else frame(TEXT, data)
        )

    def _random(self) -> bytes:
        return self.chance.choice(
            (self.chance.randbytes(self.chance.choice((1, 100, 5000))), self.corrupt(self._message()))
        )


if __name__ == "__main__":
    main(SessionCase, __doc__)
