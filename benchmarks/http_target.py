"""The HTTP server that a benchmark measures: one that runs, by its URL, or one that is started from a configuration."""

from __future__ import annotations

import argparse

import command_line


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that name the server; `parse` reads them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    command_line.add_flags(parser)
    parser.add_argument("--url", help="of a server that runs, in place of a configuration")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; ends with an error unless they name one server."""
    options = parser.parse_args()
    if (options.config is None) == (options.url is None):
        parser.error("give a configuration or --url")
    return options
