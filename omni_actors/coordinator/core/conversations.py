"""Remembers which replica has computed a conversation, so that its next turn finds the prefix cache there.

A turn brings all earlier ones along. A prompt is cut where a later one may continue it, after each message or after
each block of tokens, and the hash of all before a cut names that part. What is remembered of a request is the hash of
its whole prompt; a later request is looked up by its longest part that is known. A wrong match costs time, never an
answer: a replica computes what it does not have.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from omni_actors.coordinator.core.replicas import Replica
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import TOKEN_BYTES
from omni_actors.protocol.payloads import Prompt

BLOCK_BYTES = 256 * TOKEN_BYTES  # of token ids between two cuts
CUTS = 16  # the last ones of a prompt: more than one turn adds
SAMPLE_BYTES = 1024  # of a medium, at its start, middle and end: hashing all of a video would hold up the coordinator
DIGEST_BYTES = 8


class Part(NamedTuple):
    """The beginning of a prompt: its hash, and the part of the prompt's bytes that it is, above 0 to 1."""

    digest: bytes
    share: float


def parts_of(prompt: Prompt, buffers: Sequence[Frame], adapter: str | None = None) -> tuple[Part, ...]:
    """The beginnings of a prompt, the longest, which is whole but for a piece of a block, first; at most `CUTS`.

    Args:
        adapter: computes the prompt; another one would find nothing in the cache.
    """
    if prompt.embeds is not None:
        return ()
    pieces = _messages(prompt, buffers) if prompt.messages else _blocks(prompt, buffers)
    hashed = hashlib.blake2b(msgspec.msgpack.encode((adapter, prompt.tools)), digest_size=DIGEST_BYTES)
    cuts, size = [], 0
    for piece, length in pieces:
        hashed.update(piece)
        size += length
        cuts.append((hashed.copy(), size))
    return tuple(Part(made.digest(), length / size) for made, length in reversed(cuts[-CUTS:]))


def _messages(prompt: Prompt, buffers: Sequence[Frame]) -> list[tuple[bytes, int]]:
    pieces = []
    for message in prompt.messages:
        piece = msgspec.msgpack.encode(message)
        size = len(piece)
        for part in message.content:
            if part.media is not None:
                sample, length = _sample(prompt, part.media, buffers)
                piece, size = piece + sample, size + length
        pieces.append((piece, size))
    return pieces


def _blocks(prompt: Prompt, buffers: Sequence[Frame]) -> list[tuple[bytes, int]]:
    """Whole blocks of tokens; the media, of which the tokens do not say where they stand, go with the first one."""
    media = b"".join(_sample(prompt, index, buffers)[0] for index in range(len(prompt.media)))
    ids = prompt.token_ids
    blocks = [ids[begin : begin + BLOCK_BYTES] for begin in range(0, len(ids), BLOCK_BYTES)]
    if len(blocks) > 1 and len(blocks[-1]) < BLOCK_BYTES:
        blocks.pop()
    return [(media + block if not index else block, len(block)) for index, block in enumerate(blocks)]


def _sample(prompt: Prompt, index: int, buffers: Sequence[Frame]) -> tuple[bytes, int]:
    """Some bytes of a medium that tell it from others, and its length."""
    tensor = prompt.media[index].tensor
    if tensor.buffer >= len(buffers):
        return b"", 0
    data = memoryview(buffers[tensor.buffer]).cast("B")
    middle = len(data) // 2
    sample = b"".join(
        (
            msgspec.msgpack.encode((tensor.shape, len(data))),
            data[:SAMPLE_BYTES],
            data[middle : middle + SAMPLE_BYTES],
            data[-SAMPLE_BYTES:],
        )
    )
    return sample, len(data)


class Conversations:
    """Which replica of a stage has computed which prompts: at most `most` of them, the latest ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: collections.OrderedDict[tuple[str, bytes], tuple[int, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def computes(self, replica: Replica, parts: Sequence[Part]) -> None:
        """Note that a replica computes a prompt."""
        if not parts or not self._most:
            return
        key = (replica.stage, parts[0].digest)
        self._holders[key] = (replica.index, replica.epoch)
        self._holders.move_to_end(key)
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def holder(self, stage: str, parts: Sequence[Part]) -> tuple[int, int, float] | None:
        """The replica that has most of a prompt: its index, its epoch and the share of the prompt; `None`: none has."""
        for part in parts:
            found = self._holders.get((stage, part.digest))
            if found is not None:
                return (*found, part.share)
        return None
