"""One log format for every process: time, level, process, request, text. User content is never logged."""

from __future__ import annotations

import logging
import sys

from omni_actors import envs
from omni_actors.errors import ConfigError


class _ProcessFilter(logging.Filter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def filter(self, record: logging.LogRecord) -> bool:
        record.omni_process = self._process
        request_id = getattr(record, "request_id", None)
        record.omni_request = f" request={request_id}" if request_id else ""
        return True


def configure(process: str) -> None:
    """Log to stderr as `process`, for instance `talker/0 epoch=2`. Raises `ConfigError` for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_ProcessFilter(process))
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(omni_process)s%(omni_request)s %(name)s: %(message)s")
    )
    root = logging.getLogger("omni_actors")
    root.handlers[:] = [handler]
    level = envs.log_level()
    if level not in logging.getLevelNamesMapping():
        hint = "Use debug, info, warning or error."
        raise ConfigError(f"OMNI_ACTORS_LOG_LEVEL: there is no level {level!r}.", hint=hint)
    root.setLevel(level)
    root.propagate = False


def say(text: str) -> None:
    """A line for the person at the terminal; stdout belongs to the answer."""
    print(f"[omni_actors] {text}", file=sys.stderr, flush=True)


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name if name.startswith("omni_actors") else f"omni_actors.{name}")
