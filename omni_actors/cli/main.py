"""The `omni-actors` command: dispatches to one subcommand, each a module with a `main(arguments)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from omni_actors.processes import EXIT_OK, EXIT_USAGE

SUBCOMMANDS = {
    "launch": ("omni_actors.launch", "start a pipeline and serve it, or answer one prompt"),
    "check": ("omni_actors.launch", "print the effective configuration of a pipeline and start nothing"),
    "ctl": ("omni_actors.cli.ctl", "inspect a running pipeline; drain, restart or stop its stages"),
    "top": ("omni_actors.cli.top", "watch a running pipeline in the terminal"),
    "trace": ("omni_actors.cli.trace", "show where a request's time went"),
    "replay": ("omni_actors.cli.replay", "run a recorded stage again and compare its output"),
    "keys": ("omni_actors.cli.keys", "make CURVE keys for a pipeline, its clients and its operators"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 2 for an unknown one."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(usage())
        return EXIT_OK
    if not given or given[0] not in SUBCOMMANDS:
        problem = f"unknown command {given[0]!r}" if given else "a command is missing"
        print(f"omni-actors: {problem}\n\n{usage()}", file=sys.stderr)
        return EXIT_USAGE
    name, *rest = given
    module, _ = SUBCOMMANDS[name]
    if name == "check":
        rest = ["--check", *rest]
    code: int = importlib.import_module(module).main(rest)
    return code


def usage() -> str:
    """List the subcommands, one line each."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in SUBCOMMANDS.items()]
    return "\n".join(["usage: omni-actors COMMAND ...", "", "commands:", *lines])


if __name__ == "__main__":
    sys.exit(main())
