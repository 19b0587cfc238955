"""The `omni-actors` command: dispatches to one subcommand, each a module with a `main(arguments)` and a `parser()`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from omni_actors.host.processes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE

SUBCOMMANDS = {
    "launch": ("omni_actors.launch", "start a pipeline and serve it, or answer one prompt"),
    "check": ("omni_actors.launch", "print the effective configuration of a pipeline and start nothing"),
    "chat": ("omni_actors.cli.chat", "talk to a running pipeline in the terminal"),
    "say": ("omni_actors.cli.say", "have a running pipeline speak a text"),
    "ctl": ("omni_actors.cli.ctl", "inspect a running pipeline; drain, restart or stop its stages"),
    "top": ("omni_actors.cli.top", "watch a running pipeline in the terminal"),
    "trace": ("omni_actors.cli.trace", "show where a request's time went"),
    "keys": ("omni_actors.cli.keys", "make CURVE keys for a pipeline, its clients and its operators"),
    "completion": ("omni_actors.cli.completion", "print a script that completes this command in bash and zsh"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; 2 for an unknown one."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ("-h", "--help"):
        print(usage())
        return EXIT_OK
    if given and given[0] == "--version":
        return run("launch", given)
    if not given or given[0] not in SUBCOMMANDS:
        print(f"{usage()}\n\nomni-actors: error: {_problem(given)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return run(given[0], given[1:])
    except KeyboardInterrupt:  # before the subcommand has decided what that means
        return EXIT_INTERRUPTED


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a subcommand."""
    module, _ = SUBCOMMANDS[name]
    code: int = importlib.import_module(module).main(["--check", *arguments] if name == "check" else list(arguments))
    return code


def _problem(given: Sequence[str]) -> str:
    if not given:
        return "a command is missing"
    nearest = difflib.get_close_matches(given[0], SUBCOMMANDS, n=1)
    return f"unknown command {given[0]!r}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def usage() -> str:
    """List the subcommands, one line each."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in SUBCOMMANDS.items()]
    return "\n".join(["usage: omni-actors COMMAND ...", "", "commands:", *lines])


if __name__ == "__main__":
    sys.exit(main())
