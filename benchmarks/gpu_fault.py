"""A plugin for `recovery.py --stages fault:STAGE`: the stage writes to memory that its GPU does not have.

    OMNI_ACTORS_ALLOW_IMPORTS=benchmarks python benchmarks/recovery.py CONFIG --set 'plugins=[benchmarks.gpu_fault]' ...

Under MPS the driver then ends all processes of the GPU. Each stage waits for a file with its name in the folder that
`GPU_FAULT_FOLDER` names.
"""

import os
import threading
import time
from pathlib import Path

import setproctitle
import torch
import triton
import triton.language as tl

LOOK_SECONDS = 0.02
FOLDER = "GPU_FAULT_FOLDER"
MODELS: dict = {}  # a plugin may bring some


@triton.jit
def write_far_away(memory):
    """Write one number a thousand GiB after `memory`."""
    tl.store(memory + (1 << 40), 1.0)


def fault_when_asked(marker: Path) -> None:
    while not marker.exists():
        time.sleep(LOOK_SECONDS)
    marker.unlink()
    write_far_away[(1,)](torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


if FOLDER in os.environ:
    stage = setproctitle.getproctitle().removeprefix("omni:").partition("/")[0]
    threading.Thread(target=fault_when_asked, args=(Path(os.environ[FOLDER]) / stage,), daemon=True).start()
