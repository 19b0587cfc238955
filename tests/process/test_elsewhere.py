"""The client where Linux's own calls are missing, and a server whose packages are."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import REPOSITORY

WITHOUT_LINUX = """
import ctypes, os, signal, socket, sys, time
for module, prefixes in {
    os: ("eventfd", "EFD_", "memfd", "MFD_", "pidfd", "sched_", "pipe2", "splice"),
    signal: ("pidfd",), time: ("CLOCK_BOOT",), socket: ("SO_PEERCRED", "SO_DOMAIN"),
}.items():
    for name in [name for name in vars(module) if name.startswith(prefixes)]:
        delattr(module, name)
class Libc:
    def __init__(self, *arguments, **options): pass
ctypes.CDLL = Libc  # without prctl
"""
ASK = """
from omni_actors import OmniClient
from omni_actors.client import Audio
with OmniClient(sys.argv[1]) as client:
    items = list(client.submit("Why is the sea salt?", timeout=20))
    print("".join(item.text for item in items if not isinstance(item, Audio)))
    print(sum(len(item.samples) for item in items if isinstance(item, Audio)))
    print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "transformers", "starlette", "soxr"}))
"""


def test_the_client_needs_nothing_that_only_linux_has(echo):
    command = [sys.executable, "-c", WITHOUT_LINUX + ASK, echo.endpoint]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    text, samples, heavy = done.stdout.splitlines()
    assert text == "Why is the sea salt?"
    assert int(samples) > 0
    assert heavy == "[]"
