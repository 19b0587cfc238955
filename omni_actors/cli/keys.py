"""Makes the CURVE keys of a pipeline, its clients and its operators: `omni-actors keys DIR [--client NAME ...]`.

A new DIR becomes the pipeline's folder: copy it to every node and start with `--keys DIR`. Each `--client` may connect
and gets a folder DIR/clients/NAME, to be handed to it; an `--operator` may also drain, restart and shut down. Deleting
DIR/allowed/NAME.key, or DIR/operators/NAME.key, locks it out again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_actors import flags
from omni_actors.errors import ConfigError
from omni_actors.host.processes import EXIT_OK, EXIT_USAGE
from omni_actors.host.run_directory import expanded
from omni_actors.transport.curve import ALLOWED, CLUSTER, OPERATORS, PUBLIC, SECRET, make_client, make_cluster


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 if the folder cannot be used or keys would be overwritten)."""
    options = parser().parse_args(arguments)
    try:
        folder = expanded(options.folder, "DIR")
        if not options.client + options.operator or not (folder / f"{CLUSTER}{SECRET}").exists():
            make_cluster(folder)
            print(f"keys of the pipeline: {folder}")
            print(f"  copy it to every node, readable by its owner only, and start with --keys {folder}")
        for what, names, place in (("client", options.client, ALLOWED), ("operator", options.operator, OPERATORS)):
            for name in names:
                handed = make_client(folder, name, operator=place == OPERATORS)
                print(f"{what} {name}: {handed}")
                print("  hand it over, for OmniClient(endpoint, keys=...)")
                print(f"  to lock it out, delete {folder / place / name}{PUBLIC} where the coordinator runs")
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    usage = "omni-actors keys DIR [--client NAME ...] [--operator NAME ...]"
    parser = flags.CommandParser(prog="omni-actors keys", usage=usage, description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="the pipeline's folder; made unless a client is added")
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help="allow a client to connect")
    parser.add_argument(
        "--operator", action="append", default=[], metavar="NAME", help="the same for one that may also operate"
    )
    return parser
