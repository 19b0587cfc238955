"""What a log says of an exception that may quote a prompt."""

from __future__ import annotations

from omni_actors.errors import EngineError
from omni_actors.logs import trace_of


def divide(text: str) -> None:
    try:
        int(text)
    except ValueError as error:
        raise EngineError(f"no number: {text}") from error


def trace(text: str) -> str:
    try:
        divide(text)
    except EngineError as error:
        return trace_of(error)
    return ""


def test_a_trace_names_types_and_places_and_no_message() -> None:
    lines = trace("a secret").splitlines()
    assert "a secret" not in "".join(lines)
    assert lines[0] == "omni_actors.errors.EngineError"
    assert lines[3] == "because of builtins.ValueError"
    places = [line.rpartition("/")[2] for line in (*lines[1:3], lines[4])]
    assert [place.partition(":")[0] for place in places] == ["test_logs.py"] * 3
    assert [place.rpartition(" in ")[2] for place in places] == ["trace", "divide", "divide"]
