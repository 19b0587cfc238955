"""Compiling a grammar takes no time from the engine's loop."""

from __future__ import annotations

import os
import threading
from typing import Any

from omni_actors.engine.sampling import GrammarCompiler


def test_grammars_are_compiled_at_the_lowest_priority_and_so_is_what_their_thread_starts() -> None:
    seen: list[int] = []

    def note() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def work() -> None:
        note()
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()

    config: Any = None  # of no request with a grammar
    request: Any = type("Request", (), {"sampling_params": type("Params", (), {"structured_outputs": None})})
    prepared: Any = type("Prepared", (), {"structured_output_request": None})
    compiler = GrammarCompiler(config, lambda _: (prepared, 0))
    compiler.start(request, work)
    (done,) = compiler.take(10)
    compiler.close()
    note()
    assert done.error is None
    assert seen == [19, 19, os.getpriority(os.PRIO_PROCESS, 0)] != [19, 19, 19]
