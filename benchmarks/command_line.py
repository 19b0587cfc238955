"""Flags that benchmarks share: the model, and what to change in a configuration or in an engine's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import yaml


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model and --set KEY=VALUE, which `overrides` reads."""
    parser.add_argument("--model", help="checkpoint folder or hub name, in place of the configuration's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change any value of the YAML")


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """What --set and --model change in the configuration, by dotted key."""
    given = dict(item.split("=", 1) for item in options.set)
    return {**given, "model": options.model} if options.model else given


def set_arguments(overrides: Mapping[str, str]) -> list[str]:
    """The --set arguments that hand such changes to another program."""
    return [argument for key, value in overrides.items() for argument in ("--set", f"{key}={value}")]


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Add --set FIELD=VALUE for the arguments of a single engine, which `fields` reads."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments that --set gives, each value as YAML has it."""
    return {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in options.set)}
