"""Sends mutated messages to a live stage: nothing may crash, hang, grow or go uncounted.

    python scripts/fuzz_wire.py [--messages 1000000] [--seed 0] [--pictures]

Changes real frames (those of a few requests) at random and sends them to the inbox of an echo stage: one that
speaks, or with `--pictures` one that makes pictures of latents. The same decoder runs here: the stage must refuse what
it refuses, with the same reason and the same count. Exits with 1 at the first violation.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.config import PipelineConfig
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.codec import BadBody, BadHeader, BufferList, Decoder, Envelope, Frame, encode
from omni_actors.protocol.fields import Block, DType, Header, HostTensor, Limits, ReplicaId, pack_token_ids
from omni_actors.protocol.messages import Abort, Chunk, Credit, Ended, IntoStage, OpenRequest, StageStatus
from omni_actors.protocol.payloads import AdditionalInformationPayload, Prompt, StageParams
from omni_actors.stage.actor import StageActor
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.process import processor_class
from omni_actors.transport.sockets import Socket, Sockets, try_send
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher, held
from tests.support.waiting import until

GOOD_EVERY = 25_000
WARM_UP = 0.2  # of the messages, before memory is compared
GROWTH = 1.05
PATIENCE_SECONDS = 20.0  # with a request that is waited for, and with one that never ends
SETTLE_SECONDS = 60.0


@dataclass(frozen=True)
class Subject:
    """A pipeline, its stage that gets the messages, what is asked of it, and whether the answer is right."""

    target: str
    stages: Sequence[dict[str, Any]]
    asked: Mapping[str, Any]
    is_right: Callable[[OmniRequestOutput, str], bool]


def speaking() -> Subject:
    stages = chain()["stages"]
    for stage in stages:
        stage["engine"] = {"row_width": 64, "samples_per_token": 4}
    return Subject("talker", stages, {}, lambda got, text: got.text == text and len(got.audio) == 4 * len(text))


def drawing() -> Subject:
    stages = [
        {"name": "dit", "kind": "echo", "engine": {"latents": True}},
        {"name": "vae", "kind": "echo", "outputs": ["image"], "inputs": {"from": "dit", "processor": "latents2image"}},
    ]
    asked = {"modalities": ["image"], "params": {"dit": {"width": 32, "height": 16, "num_steps": 4, "previews": 2}}}
    return Subject("vae", stages, asked, lambda got, _: [one.shape for one in got.images] == [(16, 32, 3)])


def configuration(subject: Subject) -> dict:
    data = {**chain(), "stages": subject.stages}
    data["coordinator"] = {
        "max_timeout": PATIENCE_SECONDS,
        "default_timeout": PATIENCE_SECONDS,
        "tombstone_ttl": 2.0,
        "max_in_flight": 2000,
    }
    data["flow"] = {"early_chunk_seconds": 2.0}
    data["limits"] = {"body_bytes": 20_000, "buffer_bytes": 20_000, "message_bytes": 60_000}
    return data


def inputs(subject: Subject, ids: Mapping[str, ReplicaId]) -> list[list[bytes]]:
    """Messages of all kinds that the stage receives for a few requests, made by the stages themselves, in this process.

    Args:
        ids: the replica of each stage.
    """
    pipeline = msgspec.convert(configuration(subject), PipelineConfig)
    actors = {
        stage.name: StageActor(pipeline, stage, ids[stage.name], EchoEngine(stage), processor_class(stage), lambda: 0.0)
        for stage in pipeline.stages
    }
    received: list[list[bytes]] = []

    def pass_on(name: str, envelope: Envelope[IntoStage]) -> None:
        if name == subject.target:
            received.append([bytes(frame) for frame in encode(envelope.header, envelope.body, envelope.buffers)])
        sent = [*actors[name].receive(envelope)]
        while actors[name].runnable():
            sent += actors[name].step()
        for message in sent:
            if message.destination is not None:
                pass_on(message.destination.stage, Envelope(message.header, message.body, message.buffers))

    for text in ("a", "hello", "x" * 40, "y" * 400):
        request_id = f"r{len(text)}"
        for stage in reversed(pipeline.stages):
            prompt = None if stage.inputs else Prompt(token_ids=pack_token_ids(list(text.encode())))
            params = msgspec.convert(subject.asked.get("params", {}).get(stage.name, {}), StageParams)
            body = OpenRequest(route=tuple(ids.values()), params=params, seed=0, prompt=prompt)
            pass_on(stage.name, Envelope(Header("", request_id), body))
        for end in (Abort(), Ended((request_id,))):
            pass_on(subject.target, Envelope(Header("", request_id), end))
    last = ids[pipeline.stages[-1].name]
    credit = Credit(messages=3, bytes=1000, released=(1, 2, 3), mapped=True)
    received.append([bytes(frame) for frame in encode(Header("", stage=last.stage, epoch=last.epoch), credit)])
    return [*received, *with_information(received)]


def with_information(messages: list[list[bytes]]) -> list[list[bytes]]:
    """The first announcement and the first chunk again, with a scalar, a list and a tensor of information."""
    decoder: Decoder[IntoStage] = Decoder(IntoStage)
    made: dict[type, list[bytes]] = {}
    for envelope in map(decoder.decode, messages):
        if isinstance(envelope.body, OpenRequest | Chunk) and type(envelope.body) not in made:
            buffers = BufferList()
            buffers.buffers += envelope.buffers
            table = HostTensor(DType.U8, (64,), bytes(64))
            values = {"speed": 1.5, "names": ["a", 2], "table": table}
            body = msgspec.structs.replace(
                envelope.body, information=AdditionalInformationPayload.of(values, buffers.add)
            )
            made[type(body)] = [bytes(frame) for frame in encode(envelope.header, body, buffers.buffers)]
    return list(made.values())


class Mutator:
    """Makes random changes, repeatable by seed."""

    def __init__(self, messages: list[list[bytes]], seed: int) -> None:
        self._chance = random.Random(seed)
        by_kind: dict[str, list[list[bytes]]] = collections.defaultdict(list)
        for frames in messages:
            by_kind[msgspec.msgpack.decode(frames[1], type=Header).kind].append(frames)
        self._kinds = list(by_kind.values())  # chunks are many, aborts few: each kind has the same chance

    def next(self) -> list[bytes]:
        chance = self._chance
        frames = list(chance.choice(chance.choice(self._kinds)))
        header = msgspec.msgpack.decode(frames[1], type=Header)
        own = {"request_id": f"f{chance.getrandbits(40):x}"} if chance.random() < 0.8 else {}
        frames[1] = msgspec.msgpack.encode(msgspec.structs.replace(header, deadline=time.time() + 0.5, **own))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            self._change(frames)
        return frames

    def _change(self, frames: list[bytes]) -> None:
        chance = self._chance
        index = chance.choice((0, 1, 1, 1, 2, 2, 2, 3, 4)) % len(frames) if frames else 0
        what = chance.randrange(12)
        if what == 0 or not frames:
            frames.insert(index, chance.randbytes(chance.choice((0, 1, 4, 100))))
        elif what == 1:
            del frames[index]
        elif what == 2:
            frames[index] = frames[index][: chance.randrange(len(frames[index]) + 1)]
        elif what == 3:
            frames[index] += chance.randbytes(chance.choice((1, 2, 8, 2000)))
        elif what == 4:
            other = chance.choice(chance.choice(self._kinds))
            frames[index] = other[index % len(other)]
        elif what == 5:
            frames.append(frames[index])
        elif what == 6:
            frames[index] = chance.choice((b"", b"\xc0", b"\x91" * 3000, b"\x81\xa4type\xa5chunk", b"\xff" * 1100))
        else:
            frames[index] = self._flip(frames[index])

    def _flip(self, frame: bytes) -> bytes:
        if not frame:
            return frame
        changed = bytearray(frame)
        for _ in range(self._chance.choice((1, 1, 2, 8))):
            position = self._chance.randrange(len(changed))
            if self._chance.random() < 0.5:
                changed[position] ^= 1 << self._chance.randrange(8)
            else:
                changed[position] = self._chance.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xCB, 0xCF, 0xD3, 0xDD, 0xFF))
        return bytes(changed)


def no_arena(header: Header, block: Block) -> memoryview:
    raise InvalidPayload("not mapped")


def send(socket: Socket, frames: list[Frame]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not try_send(socket, frames):
        socket.poll(100, zmq.POLLOUT)
        if time.monotonic() > deadline:
            raise SystemExit(f"the stage has taken no message for {SETTLE_SECONDS:g} s")


def status_of(launcher: EchoLauncher, target: str) -> StageStatus:
    return next(stage for stage in launcher.describe().stages if stage.stage == target)


def memory(launcher: EchoLauncher) -> dict[str, int]:
    pids = {f"{stage.stage}": stage.pid for stage in launcher.describe().stages} | {"launcher": launcher.process.pid}
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


async def good_request(launcher: EchoLauncher, subject: Subject) -> None:
    async with AsyncOmniClient(launcher.endpoint) as client:
        output = await client.generate("still here", timeout=PATIENCE_SECONDS - 0.1, **subject.asked)
    if not subject.is_right(output, "still here"):
        raise SystemExit(f"a good request got {output}")


def main(options: argparse.Namespace) -> None:
    subject = drawing() if options.pictures else speaking()
    with tempfile.TemporaryDirectory(prefix="fz-", dir="/tmp") as name:
        folder = Path(name)
        launcher = EchoLauncher(folder, configuration(subject)).wait_ready()
        ids = {one.stage: ReplicaId(one.stage, one.replica, one.epoch) for one in launcher.describe().stages}
        mutator = Mutator(inputs(subject, ids), options.seed)
        try:
            run(launcher, subject, mutator, options.messages)
            if launcher.end() != 0:
                raise SystemExit("the pipeline did not end well")
        finally:
            if launcher.process.poll() is None:
                launcher.process.kill()


def run(launcher: EchoLauncher, subject: Subject, mutator: Mutator, total: int) -> None:
    def target() -> StageStatus:
        return status_of(launcher, subject.target)

    decoder: Decoder[IntoStage] = Decoder(
        IntoStage, msgspec.convert(configuration(subject)["limits"], Limits), no_arena
    )
    accepted: collections.Counter[str] = collections.Counter()
    sockets = Sockets()
    inbox = next(path for path in folder_of(launcher).glob(f"{subject.target}-0-*"))
    socket = sockets.push(f"ipc://{inbox}")
    pid, received = target().pid, target().counts["total_received"]
    began = time.monotonic()
    before: dict[str, int] = {}
    goods = 0
    for number in range(total):
        frames = mutator.next()
        with contextlib.suppress(BadHeader, BadBody):
            accepted[decoder.decode(frames).header.kind] += 1
        send(socket, frames or [b""])
        if number % GOOD_EVERY == GOOD_EVERY - 1:
            asyncio.run(good_request(launcher, subject))
            goods += 1
        if not before and number >= WARM_UP * total:
            before = memory(launcher)
    if decoder.rejected.total() + accepted.total() != total:
        raise SystemExit("a refused message was not counted")
    expected = {f"rejected_{reason}": count for reason, count in decoder.rejected.items()}

    def settled() -> bool:
        counts = target().counts
        return {name: n for name, n in counts.items() if name.startswith("rejected_")} == expected

    until(settled, SETTLE_SECONDS, lambda: f"{target().counts} instead of {expected}")
    asyncio.run(good_request(launcher, subject))
    until(lambda: not held(launcher.describe()), SETTLE_SECONDS, lambda: f"still held: {held(launcher.describe())}")
    after = memory(launcher)
    counts = target().counts
    sockets.context.destroy(linger=0)
    print(f"{total} messages in {time.monotonic() - began:.0f} s, {goods + 1} good requests between and after them")
    print(f"refused {decoder.rejected.total()}: {dict(decoder.rejected.most_common())}")
    print(f"well-formed {accepted.total()}: {dict(accepted)}")
    print(f"dropped or answered by the stage: { {k: n for k, n in counts.items() if k.startswith('dropped_')} }")
    for name, size in after.items():
        print(f"RSS of {name}: {before[name] / 2**20:.1f} -> {size / 2**20:.1f} MiB")
        if size > GROWTH * before[name] + (4 << 20):
            raise SystemExit(f"{name} grows")
    if target().pid != pid:
        raise SystemExit("the stage was restarted")
    uncounted = counts["total_received"] - received - total
    if uncounted < 0:
        raise SystemExit(f"{-uncounted} messages were not counted")


def folder_of(launcher: EchoLauncher) -> Path:
    return Path(launcher.endpoint.removeprefix("ipc://")).parent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", action="store_true", help="send to a stage that makes pictures")
    main(parser.parse_args())
