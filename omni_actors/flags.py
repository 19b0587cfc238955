"""Command lines: their parser, and types of flags. A value out of range ends the command with 2 and names the flag."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import NoReturn

LONGEST_SECONDS = 1e7
LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 1024
LONGEST_NUMBER = 64  # characters


class CommandParser(argparse.ArgumentParser):
    """Answers a mistake with a short usage, the nearest flag and where help is, and not with every flag there is."""

    def error(self, message: str) -> NoReturn:
        """End the command with 2."""
        known = re.findall(r"--[a-z][a-z-]+", self.format_help())
        for word in re.findall(r"(?<![\w-])--[\w-]+", message):
            if word not in known and (nearest := difflib.get_close_matches(word, known, n=1)):
                message += f"; did you mean {nearest[0]}?"
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n{self.prog} --help lists everything\n")


def seconds(text: str) -> float:
    """A time above 0, up to the longest that the configuration knows."""
    number = finite(text)
    if not 0 < number <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {LONGEST_SECONDS:g}")
    return number


def seconds_or_none(text: str) -> float:
    """The same, or 0 for none."""
    return 0.0 if finite(text) == 0 else seconds(text)


def seed(text: str) -> int:
    """A seed as requests take it."""
    return whole(text, LARGEST_SEED)


def count(text: str) -> int:
    """A number of things, perhaps none."""
    return whole(text, LARGEST_COUNT)


def whole(text: str, largest: int) -> int:
    """A whole number from 0 to `largest`."""
    if len(text) > LONGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"a number of {len(text)} characters is too long")
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= largest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {largest}")
    return number


def text(given: str) -> str:
    """A text that can be sent: UTF-8, without control characters other than line breaks and tabs."""
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in given):
        raise argparse.ArgumentTypeError("the text is not encoded in UTF-8")
    return given


def line(given: str) -> str:
    """A text of one line that is not empty."""
    if not given or not text(given).isprintable():
        raise argparse.ArgumentTypeError(f"{given!r} is not a text of one line")
    return given


def path(given: str) -> Path:
    """The path of a file or folder."""
    if not given:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(given)


def finite(text: str) -> float:
    """A number whose range is checked elsewhere, but neither infinite nor NaN."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number
