"""The main program of a decoder: `python -m omni_actors.media.worker`, with a socket as its standard input.

Files of strangers are read by C code. Here a crash, a hang or gigabytes of memory end only this process, and whatever
takes it over finds no file or socket that it could open: the kernel gives this process no further descriptor.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path

from omni_actors.errors import OmniError
from omni_actors.host.processes import die_with_parent
from omni_actors.media.limits import Budget
from omni_actors.media.messages import UNKNOWN_FILE, Channel, Decoded, Job, Measured, Refused, Started
from omni_actors.media.readers import decode, measure, preload, sniff

PAGE = resource.getpagesize()


def main(parent: int, memory_bytes: int) -> None:
    """Serve jobs until the other end closes the socket.

    Args:
        parent: process id of the process that this one works for.
        memory_bytes: address space that decoding may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    channel = Channel(socket.socket(fileno=os.dup(0)))
    preload()
    _confine(memory_bytes)
    channel.send(Started())
    while True:
        try:
            job: Job = channel.receive(Job)
        except EOFError:
            return
        _serve(channel, job)


def _confine(memory_bytes: int) -> None:
    """Limit memory, and allow no file or socket besides the one that is open."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # a file could make C libraries write any number of lines into the log
    os.close(silence)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * PAGE + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _serve(channel: Channel, job: Job) -> None:
    data = [bytes(channel.data(bytearray(item.size))) for item in job.items]
    try:
        if job.items and job.items[0].kind == UNKNOWN_FILE:
            channel.send(Measured(0, modality=sniff(data[0])))
            return
        announced, budget = Budget(job.limits, job.used), Budget(job.limits, job.used)
        measured = []
        for item, content in zip(job.items, data, strict=True):
            measured.append(measure(item.kind, content, job.limits, item.what))
            announced.take(measured[-1].size, item.what)
        channel.send(Measured(sum(one.size for one in measured), sum(one.seconds for one in measured)))
        for index, item in enumerate(() if job.measure else job.items):
            content, data[index] = data[index], b""
            decoded = decode(item.kind, content, item.rate, job.limits, budget, item.what)
            channel.send(Decoded(decoded.shape), [decoded.data.cast("B")])
            del decoded, content
    except OmniError as error:
        channel.send(Refused(type(error).__name__, error.message, error.hint))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
