"""Importing this module imports everything that a stage needs: the one name a forkserver preloads.

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["omni_actors.engine.preload"])
"""

from __future__ import annotations

import gc
import importlib
import threading

from omni_actors.engine.platform import preload_modules
from omni_actors.errors import StartupError

for _name in preload_modules():
    importlib.import_module(_name)


def check_forkable() -> None:
    """Raise `StartupError` if importing started threads or CUDA: children forked from here would then break."""
    import torch

    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads or torch.cuda.is_initialized():
        raise StartupError(
            f"Preloading left threads {threads} or CUDA (initialised: {torch.cuda.is_initialized()}) behind.",
            hint="Start the stages with the spawn method instead.",
        )


check_forkable()
# Children neither scan nor copy what is loaded now: vLLM collects garbage eight times while it starts, 0.3 s each.
gc.freeze()
