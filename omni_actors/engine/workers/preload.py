"""Imports everything that a stage needs: the one module that a fork server preloads.

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["omni_actors.engine.workers.preload"])
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Mapping

from omni_actors.engine.models import MODULES
from omni_actors.engine.platform import keep_bytecode, preload_modules
from omni_actors.errors import StartupError
from omni_actors.logs import get_logger
from omni_actors.stage.process import PRELOAD_FAILURES

logger = get_logger(__name__)


def import_all() -> None:
    """Import the stages' modules. Stages that start later end with a failure recorded here; the server goes on."""
    name = "omni_actors.engine.platform"
    try:
        keep_bytecode()
        for name in preload_modules():
            importlib.import_module(name)
        for name in dict.fromkeys(MODULES.values()):
            import_model(name)
        name = "the fork server"
        check_forkable()
    except Exception as error:  # third-party modules raise anything; the stages report it when they start
        logger.exception("preloading %s failed; stages forked from here will not start", name)
        PRELOAD_FAILURES.append(f"{name}: {type(error).__name__}: {error}")


def import_model(name: str) -> None:
    """Import the module of a model's stage, and what it names by class path."""
    found = importlib.import_module(name).SPEC
    for spec in found.values() if isinstance(found, Mapping) else (found,):
        for class_path in filter(None, (spec.adapter, spec.runner)):
            importlib.import_module(class_path.rpartition(".")[0])


def check_forkable() -> None:
    """Raise `StartupError` if the imports started threads or CUDA: neither survives a fork."""
    import torch

    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads or torch.cuda.is_initialized():
        raise StartupError(
            f"Preloading left threads {threads} or CUDA (initialised: {torch.cuda.is_initialized()}) behind.",
            hint="Start the stages with the spawn method instead.",
        )


# Looking for garbage while so much is loaded takes an eighth of the time and finds 2 % of the objects.
gc.disable()
import_all()
# Children then neither scan nor copy what is loaded now: vLLM runs the garbage collector eight times while it starts,
# 0.3 s each.
gc.freeze()
gc.enable()
