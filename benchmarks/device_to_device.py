"""Measures the transfer of rows between the GPUs of two processes: through the host, like the stages, and by CUDA IPC.

    python benchmarks/device_to_device.py [--sizes 7168 229376 4194304 67108864] [--repeats 200] [--devices 0 1]

Host: device -> pinned memory -> shared memory -> device of the other process, the way of rows through the arena
(without the message, which both ways need). IPC: a copy into a buffer that the other process has opened, and from which
it copies. Times are from the call until the data is on the receiving device, in microseconds (median). The two
processes signal each other by spinning on shared memory, so the times contain no wake-up. Sizes are in bytes. Needs
CUDA.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

torch.set_num_threads(1)  # as in a stage: with several spinning threads a copy of 0.2 MiB took 8 ms

WAIT_SECONDS = 60.0


def wait_for(flags: np.ndarray, index: int, value: int) -> None:
    """Wait until the other process has set the flag."""
    deadline = time.perf_counter() + WAIT_SECONDS
    while flags[index] != value:
        if time.perf_counter() > deadline:
            raise TimeoutError("The other process did not answer.")


def receive(name: str, options: argparse.Namespace, pipe: Any) -> None:
    """The consumer: copy what the producer has sent, in the way that it has used, then signal it."""
    memory = SharedMemory(name)
    flags = np.frombuffer(memory.buf, np.int64, 2)
    torch.cuda.set_device(options.devices[1])
    opened = pipe.recv()  # a CUDA tensor of the other process
    host = torch.frombuffer(memory.buf, dtype=torch.uint8, offset=4096)
    turn = 0
    for size in options.sizes:
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        for source in (host[:size], opened[:size]):
            for _ in range(options.repeats):
                turn += 1
                wait_for(flags, 0, turn)
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                flags[1] = turn
        if int(target[-1]) != 7:
            raise RuntimeError("The data did not arrive.")
    os._exit(0)  # torch still holds views of the shared memory, about which an ordinary exit would complain


def main(options: argparse.Namespace) -> None:
    torch.cuda.set_device(options.devices[0])
    memory = SharedMemory(create=True, size=4096 + max(options.sizes))
    flags = np.frombuffer(memory.buf, np.int64, 2)
    flags[:] = 0
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other: multiprocessing.Process = context.Process(target=receive, args=(memory.name, options, theirs), daemon=True)
    other.start()
    shared = torch.empty(max(options.sizes), dtype=torch.uint8, device="cuda")
    ours.send(shared)
    source = torch.full((max(options.sizes),), 7, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(max(options.sizes), dtype=torch.uint8, pin_memory=True)
    host = torch.frombuffer(memory.buf, dtype=torch.uint8, offset=4096)
    torch.cuda.synchronize()

    def over_host(size: int) -> None:
        pinned[:size].copy_(source[:size], non_blocking=True)
        torch.cuda.synchronize()
        host[:size].copy_(pinned[:size])

    def over_ipc(size: int) -> None:
        shared[:size].copy_(source[:size], non_blocking=True)
        torch.cuda.synchronize()

    turn = 0
    print(f"{torch.cuda.get_device_name()}, devices {options.devices}, torch {torch.__version__}")
    print("| bytes | over the host, us | CUDA IPC, us | host : IPC |\n|---|---|---|---|")
    for size in options.sizes:
        medians = []
        for way in (over_host, over_ipc):
            times = []
            for _ in range(options.repeats):
                turn += 1
                began = time.perf_counter()
                way(size)
                flags[0] = turn
                wait_for(flags, 1, turn)
                times.append(1e6 * (time.perf_counter() - began))
            medians.append(statistics.median(times))
        print(f"| {size} | {medians[0]:.0f} | {medians[1]:.0f} | {medians[0] / medians[1]:.2f} |", flush=True)
    other.join(WAIT_SECONDS)
    memory.unlink()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[7168, 229376, 1 << 20, 4 << 20, 16 << 20, 64 << 20])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--devices", type=int, nargs=2, default=[0, 1])
    main(parser.parse_args())
