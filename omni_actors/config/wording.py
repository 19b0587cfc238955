"""msgspec's errors about users' values in the words of the YAML, with the nearest value that is possible."""

from __future__ import annotations

import enum
import re
from typing import Any, NamedTuple

from msgspec import Struct, ValidationError

from omni_actors.config.dotted_keys import Place, annotation_at, plain_types, suggest

_PLACE = re.compile(r" - at `(?:key` in `)?\$(?P<path>.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]+)`(?P<bound>.*?)(?:, got `(?P<given>[^`]+)`)?")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_ENUM = re.compile(r"Invalid enum value '?(?P<value>.*?)'?")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}


class Problem(NamedTuple):
    """Where a value is wrong, and what is wrong with it."""

    place: Place
    text: str


def explain(error: ValidationError, struct: type[Struct]) -> Problem:
    """Take an error of a conversion to `struct` apart."""
    message = str(error)
    found = _PLACE.search(message)
    steps: list[str | int] = []
    for name, index in _STEP.findall(found["path"]) if found is not None else ():
        steps.append(int(index) if index else name)
    problem = message[: found.start()] if found is not None else message
    return Problem(tuple(steps), _reworded(problem, annotation_at(tuple(steps), struct)))


def reworded(problem: str) -> str:
    """The same for a problem that was taken apart already, whose values are no enums."""
    return _reworded(problem, None)


def sentence(problem: str) -> str:
    """A problem with a mark at its end."""
    return problem if problem.endswith((".", "?")) else f"{problem}."


def _reworded(problem: str, annotation: Any) -> str:
    if found := _MISSING.fullmatch(problem):
        return f"the key {found[1]!r} is missing"
    if found := _ENUM.fullmatch(problem):
        parts = list(plain_types(annotation))
        known = [str(part) for part in parts if isinstance(part, str)]  # of a `Literal`
        for part in parts:
            if isinstance(part, type) and issubclass(part, enum.Enum):
                known += [str(member.value) for member in part]
        return f"there is no {found['value']!r} here.{suggest(found['value'], known)}"
    if found := _EXPECTED.fullmatch(problem):
        wanted = " or ".join(_WORDS.get(kind, kind) for kind in found["wanted"].split(" | "))
        given = f", and is {_WORDS.get(found['given'], found['given'])}" if found["given"] else ""
        return f"must be {wanted}{found['bound']}{given}"
    return problem
