"""Measures the wire on one host: one command, one table.

    python benchmarks/ipc.py [--sizes 64 7168 ...] [--messages 3000] [--rounds 3] [--only-arena]

A hop is everything between two stages: the sender's queue, `Outbound`, codec, socket or arena, `Inbound` with all
checks, the receiver's queue, credit and the return of blocks. It is measured one way, from the call that sends to the
engine loop that takes, with 64 streams that send in turn. In the same run, for comparison: a bare blocking
pyzmq hop (no threads, no codec) and a bare ring of preallocated shared memory (one copy in, read in place, a zmq
message as the signal).
"""

from __future__ import annotations

import argparse
import collections
import mmap
import multiprocessing
import os
import platform
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy
import zmq

from omni_actors import __version__
from omni_actors.config import FlowConfig
from omni_actors.protocol.codec import BufferList, Decoder, encode
from omni_actors.protocol.fields import DType, Header, HostTensor, Limits, ReplicaId
from omni_actors.protocol.messages import ROWS, Chunk, Hello, IntoStage, Peer, Peers
from omni_actors.stage.inbound import Inbound, Inbox, Received
from omni_actors.stage.outbound import Outbound, Outgoing
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.link import ReceivedCredit
from omni_actors.transport.sockets import Sockets

SIZES = (64, 1 << 10, 7 << 10, 32 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
STREAMS = 64
STREAM_SECONDS = 0.020  # between two messages of a stream
WARM_UP = 50
SENDER, RECEIVER = ReplicaId("thinker", 0, 1), ReplicaId("talker", 0, 1)
LARGE = 1 << 20
LARGE_PAUSE = 0.005
COLUMNS = ("zmq", "ring", "arena", "ipc", "tcp")


class Plan:
    """Small messages come from 64 streams in turn, at their pace; large ones each a little after the last has come.

    `burst` of them are sent at once by a step.
    """

    def __init__(self, size: int, messages: int, burst: int = 1) -> None:
        self.size, self.burst, self.paced = size, burst, size < LARGE
        count = messages if self.paced else max(20, min(messages, (4 << 30) // size))
        self.total = (count + WARM_UP) // burst * burst


class End:
    """One process's threads, wired as `StageProcess` does."""

    def __init__(self, folder: str, me: ReplicaId, flow: FlowConfig, transport: str) -> None:
        self.sockets = Sockets()
        self._control, control = self.sockets.router(f"ipc://{folder}/control-{me.stage}")
        self.inbox = Inbox()
        self.arena = Arena(flow.arena_bytes) if flow.arena_bytes and me == SENDER else None
        self.arenas = ArenaReader(lambda: self.outbound.wake())
        inbox = f"ipc://{folder}/{me.stage}" if transport == "ipc" else "tcp://127.0.0.1:0"
        self.endpoint: queue.SimpleQueue[str] = queue.SimpleQueue()
        wiring = Sockets(self.sockets.context), me, control, inbox, self._hello, self.inbox, Limits(), 1.0, os.getpid()
        granted = lambda receiver, credit: self.outbound.granted(receiver, credit)  # noqa: E731
        self.inbound = Inbound(*wiring, lambda: None, self.arenas, granted)
        self.outbound = Outbound(self.sockets, me, Limits(), flow, self.inbox.put, self.arena, self.arenas)
        self.inbound.start()
        self.outbound.start()

    def _hello(self, endpoint: str, remote: str) -> Hello:
        self.endpoint.put(endpoint)
        return Hello(1, "x", "x", os.getpid(), endpoint)

    def close(self) -> None:
        self.outbound.finish()
        self.outbound.join(5)
        self.inbound.finish()
        self.inbound.join(5)
        self.sockets.context.destroy(linger=0)


def receive_hop(pipe: Connection, came: Any, folder: str, flow: FlowConfig, transport: str, total: int) -> None:
    """The receiving process: the latencies in seconds go through the pipe, their number so far into `came`."""
    end = End(folder, RECEIVER, flow, transport)
    received: ReceivedCredit[ReplicaId | None] = ReceivedCredit(flow.edge_messages, flow.edge_bytes)
    pipe.send(end.endpoint.get())
    inbox, address = pipe.recv()
    end.arenas.attach({SENDER: address})
    end.outbound.set_peers(Peers(peers=(), sources=(Peer(SENDER, inbox, address),)))
    latencies: list[float] = []
    last = time.monotonic()
    while len(latencies) < total:
        events = end.inbox.take(1.0)
        if events:
            last = time.monotonic()
        elif time.monotonic() > last + 30:
            raise SystemExit("nothing came for 30 s")
        while events:
            event = events.pop(0)
            if not isinstance(event, Received) or not isinstance(event.envelope.body, Chunk):
                raise SystemExit(f"unexpected: {event}")
            latencies.append((time.monotonic_ns() - event.envelope.body.start) / 1e9)
            due = received.take(event.envelope.header.sender, event.size)
            del event
            came.value = len(latencies)
            for sender, messages, size in received.collect(everything=False) if due else ():
                end.outbound.grant(sender, messages, size)
    pipe.send(latencies)
    pipe.recv()
    end.close()


def measure_hop(steps: Plan, transport: str, arena: bool, calls: list[float] | None = None) -> list[float]:
    """Latencies in seconds of hops with `size` bytes of rows; into `calls`, how long each call held up its thread."""
    size = steps.size
    flow = FlowConfig(arena_bytes=max(64 << 20, 3 * size) if arena else 0, edge_bytes=1 << 30, outbox_bytes=1 << 30)
    with tempfile.TemporaryDirectory(prefix="ipc-") as folder:
        end = End(folder, SENDER, flow, transport)
        pipe, came, process = start(receive_hop, folder, flow, transport, steps.total)
        end.outbound.set_peers(Peers(peers=(Peer(RECEIVER, pipe.recv(), None),)))
        pipe.send((end.endpoint.get(), end.arena.address if end.arena is not None else None))
        deadline = time.monotonic() + 30
        while arena and RECEIVER not in end.outbound.readers:
            if time.monotonic() > deadline:
                raise SystemExit("the receiver did not say within 30 s that it reads the arena")
            time.sleep(0.01)
        rows = HostTensor(DType.BF16, (1, size // 2), memoryview(os.urandom(size)))

        def send(number: int) -> None:
            batch = []
            for stream in range(number, number + steps.burst):
                buffers = BufferList()
                header = Header("", f"stream-{stream % STREAMS}", SENDER.stage, SENDER.replica, SENDER.epoch, 0, stream)
                body = Chunk(tensors={ROWS: buffers.add(rows)}, start=time.monotonic_ns())
                batch.append(Outgoing(RECEIVER, header, body, buffers.buffers))
            began = time.perf_counter()
            end.outbound.send(batch, idle=True)  # as a stage whose engine waits for input
            if calls is not None:
                calls.append(time.perf_counter() - began)

        latencies = drive(steps, send, pipe, came)
        if end.arena is not None and end.arena.fallbacks:
            print(f"note: {end.arena.fallbacks} buffers of {size} bytes found no room in the arena")
        pipe.send("end")
        process.join(10)
        end.close()
    return latencies


def receive_bare(
    pipe: Connection, came: Any, endpoint: str, descriptor: str, size: int, total: int, copy: bool
) -> None:
    """A blocking loop on one PULL. With a descriptor the payload is read in place from shared memory."""
    socket = zmq.Context().socket(zmq.PULL)
    socket.bind(endpoint)
    ring = None
    if descriptor:
        file = os.open(descriptor, os.O_RDONLY)
        ring = memoryview(mmap.mmap(file, 2 * size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
    pipe.send("ready")
    latencies = []
    while len(latencies) < total:
        frames = socket.recv_multipart(copy=copy)
        stamp, slot = int.from_bytes(bytes(frames[0]), "little"), len(latencies) % 2
        payload = ring[slot * size : (slot + 1) * size] if ring is not None else memoryview(frames[1])
        if len(payload) != size:
            raise SystemExit("wrong size")
        latencies.append((time.monotonic_ns() - stamp) / 1e9)
        came.value = len(latencies)
    pipe.send(latencies)


def measure_bare(steps: Plan, ring: bool) -> list[float]:
    """The same with nothing around it: zmq alone, or a ring of two slots and zmq for the signal."""
    size, copy = steps.size, ring or steps.size < LARGE // 4
    payload = os.urandom(size)
    with tempfile.TemporaryDirectory(prefix="ipc-") as folder:
        endpoint = f"ipc://{folder}/bare"
        descriptor, memory = "", None
        if ring:
            file = os.memfd_create("ring")
            os.posix_fallocate(file, 0, 2 * size)
            descriptor = f"/proc/{os.getpid()}/fd/{file}"
            memory = numpy.frombuffer(mmap.mmap(file, 2 * size, mmap.MAP_SHARED | mmap.MAP_POPULATE), numpy.uint8)
        source = numpy.frombuffer(payload, numpy.uint8)
        pipe, came, process = start(receive_bare, endpoint, descriptor, size, steps.total, copy)
        pipe.recv()
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(endpoint)

        def send(number: int) -> None:
            stamp = time.monotonic_ns().to_bytes(8, "little")
            if memory is None:
                socket.send_multipart([stamp, payload], copy=copy)
            else:
                slot = number % 2 * size
                numpy.copyto(memory[slot : slot + size], source)
                socket.send(stamp)

        latencies = drive(steps, send, pipe, came)
        process.join(10)
        context.destroy(linger=0)
        if ring:
            os.close(file)
    return latencies


def drive(steps: Plan, send: Callable[[int], None], pipe: Connection, came: Any) -> list[float]:
    next_time = time.monotonic() + 0.1
    for number in range(0, steps.total, steps.burst):
        if steps.paced:
            time.sleep(max(0.0, next_time - time.monotonic()))
            next_time = max(next_time, time.monotonic() - 0.05) + STREAM_SECONDS / STREAMS * steps.burst
        send(number)
        while not steps.paced and came.value <= number:
            time.sleep(0.0001)
        if not steps.paced:
            time.sleep(LARGE_PAUSE)
    if not pipe.poll(60):
        raise SystemExit("the receiver did not get everything within 60 s")
    latencies: list[float] = pipe.recv()
    return latencies[WARM_UP:]


def start(target: Callable[..., None], *arguments: Any) -> tuple[Connection, Any, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    came = context.RawValue("L", 0)
    process = context.Process(target=target, args=(theirs, came, *arguments), daemon=True)
    process.start()
    return ours, came, process


def codec_seconds() -> float:
    """Encode, validate, decode of a row message of 7 KiB: best of many rounds, in seconds per message."""
    rows = HostTensor(DType.BF16, (1, 3584), bytes(7168))
    header = Header("", "request-0123456789abcdef", "thinker", 0, 1, 0, 7, 1e9)
    decoder: Decoder[IntoStage] = Decoder(IntoStage)
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(1000):
            buffers = BufferList()
            frames = encode(header, Chunk(tensors={ROWS: buffers.add(rows)}, start=7), buffers.buffers)
            decoder.decode(frames)
        best = min(best, (time.perf_counter() - began) / 1000)
    return best


def microseconds(latencies: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(latencies)
    return 1e6 * statistics.median(ordered), 1e6 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def name_of(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def main(options: argparse.Namespace) -> None:
    print(
        f"omni_actors {__version__}, Python {platform.python_version()}, pyzmq {zmq.__version__}, "
        f"libzmq {zmq.zmq_version()}, {os.cpu_count()} cores, {options.messages} messages"
    )
    print("\nmicroseconds, median / 99 %; ratio of medians; call: what sending takes of the engine's thread, median\n")
    print("| payload | bare zmq | bare ring | hop, ipc | ipc, no arena | hop, tcp | hop : zmq | hop : ring | call |")
    print("|---|---|---|---|---|---|---|---|---|")
    calls: list[float] = []
    for size in options.sizes:
        steps = Plan(size, options.messages // options.rounds)
        pooled: dict[str, list[float]] = collections.defaultdict(list)
        calls.clear()
        for _ in range(options.rounds):  # in turn: the load of a shared machine comes and goes
            pooled["zmq"] += measure_bare(steps, ring=False)
            pooled["ring"] += measure_bare(steps, ring=True)
            pooled["arena"] += measure_hop(steps, "ipc", True, calls)
            if not options.only_arena:
                pooled["ipc"] += measure_hop(steps, "ipc", arena=False)
                pooled["tcp"] += measure_hop(steps, "tcp", arena=False)
        columns = {name: microseconds(latencies) for name, latencies in pooled.items()}
        cells = [f"{columns[name][0]:.0f} / {columns[name][1]:.0f}" if name in columns else "" for name in COLUMNS]
        hop = columns["arena"][0]
        ratios = [f"{hop / columns[name][0]:.2f}" for name in ("zmq", "ring")]
        call = f"{microseconds(calls)[0]:.0f}"
        print(f"| {name_of(size)} | {' | '.join([*cells, *ratios, call])} |", flush=True)
    middle, late = microseconds(measure_hop(Plan(7 << 10, options.messages, burst=STREAMS), "ipc", arena=True))
    print(f"\n{STREAMS} messages of 7 KiB in one step: {middle:.0f} / {late:.0f} us each")
    print(f"encode + validate + decode of a 7 KiB row message: {1e6 * codec_seconds():.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-arena", action="store_true", help="leave out the hops without arena and by tcp")
    main(parser.parse_args())
