"""The coordinator's process: a child of the launcher, light enough to restart in a fraction of a second.

The launcher writes a `CoordinatorSpec` to its stdin, and reads one line from its stdout when it listens, or why it
cannot, and one when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import setproctitle

from omni_actors import logs
from omni_actors.coordinator import Answer, CoordinatorSpec, Finished, Listening
from omni_actors.coordinator.shell import Coordinator
from omni_actors.errors import OmniError
from omni_actors.host.processes import EXIT_OK
from omni_actors.host.run_directory import clear_abandoned
from omni_actors.protocol.messages import Failed
from omni_actors.telemetry.collector import span_exporter

logger = logs.get_logger(__name__)

ORPHAN_SECONDS = 3.0  # after which a process without a launcher ends even if its event loop hangs
FAREWELL_SECONDS = 0.2  # for the last answers to clients when the launcher is dead
EXIT_REFUSED = 3
EXIT_BROKEN = 4


def main() -> int:
    """Run until SIGTERM, an operator's shutdown, or a launch that fails.

    Exit code 0; 3 if it cannot start, 4 if it cannot go on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides in which order things end
    setproctitle.setproctitle("omni:coordinator")
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=CoordinatorSpec)
    logs.configure("coordinator")
    return asyncio.run(_run(spec))


async def _run(spec: CoordinatorSpec) -> int:
    loop = asyncio.get_running_loop()
    try:
        launcher = os.pidfd_open(spec.launcher_pid)
        coordinator = Coordinator(spec, span_exporter(spec.pipeline))
    except OSError:  # it died before us
        return EXIT_REFUSED
    except OmniError as error:
        _answer(Failed.from_error(error))
        return EXIT_REFUSED
    loop.set_exception_handler(functools.partial(_on_exception, coordinator))
    loop.add_reader(launcher, _on_launcher_dead, spec, coordinator, launcher)
    threading.Thread(target=_end_as_orphan, args=(spec, launcher), daemon=True).start()
    loop.add_signal_handler(signal.SIGTERM, coordinator.stop)
    _answer(Listening(coordinator.client_endpoint, coordinator.control_endpoint))
    try:
        await coordinator.run()
    except Exception:
        logger.critical("the coordinator cannot go on; its launcher starts another one", exc_info=True)
        return EXIT_BROKEN
    _answer(Finished(coordinator.fleet.launch.failure))
    return EXIT_OK


def _answer(answer: Answer) -> None:
    """Write a line to the launcher, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _on_exception(coordinator: Coordinator, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End when a callback fails, such as one that reads a socket: what it had decided has perhaps not happened."""
    loop.default_exception_handler(context)
    if (error := context.get("exception")) is not None:
        coordinator.give_up(error)


def _on_launcher_dead(spec: CoordinatorSpec, coordinator: Coordinator, launcher: int) -> None:
    """Answer the clients and end. Sockets stay open: closing them would remove the files of the next launcher's."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(launcher)
    logger.error("the launcher is gone")
    coordinator.abandon()
    loop.call_later(FAREWELL_SECONDS, _leave, spec)


def _end_as_orphan(spec: CoordinatorSpec, launcher: int) -> None:
    select.select([launcher], [], [])
    time.sleep(ORPHAN_SECONDS)
    _leave(spec)


def _leave(spec: CoordinatorSpec) -> None:
    clear_abandoned(Path(spec.run_dir), spec.run_dir_is_temporary)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
