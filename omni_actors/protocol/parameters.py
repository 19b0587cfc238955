"""Parameters that a model declares: what a request may set for its stage, within which limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Name, Scalar

MAX_PARAMETERS = 64
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "text": (str,), "bool": (bool,)}
_WORDS = {"int": "a whole number", "float": "a number", "text": "a text", "bool": "true or false"}


class Parameter(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A parameter that a request may set for a stage.

    Args:
        name: of a field of `StageParams`, or of an entry of its `extra_args`.
        kind: the type of its values.
        least: smallest number.
        most: largest number; of a text, the most characters.
        multiple_of: what a whole number must divide by; 0 for any.
        choices: the only texts; empty for any.
        default: what holds for a request that does not set it, for people to read; to clients, the pipeline's own.
        about: what it does, in a phrase.
    """

    name: Name
    kind: Literal["int", "float", "text", "bool"]
    least: float | None = None
    most: float | None = None
    multiple_of: Annotated[int, Meta(ge=0, le=65536)] = 0
    choices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    default: Scalar | None = None
    about: Annotated[str, Meta(max_length=256)] = ""

    def problem(self, value: object) -> str:
        """What is wrong with a value, as the end of a sentence that begins with the parameter; "" for nothing."""
        if not isinstance(value, _TYPES[self.kind]) or isinstance(value, bool) != (self.kind == "bool"):
            return f"must be {_WORDS[self.kind]}"
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            too_long = self.most is not None and len(value) > self.most
            return f"may have at most {self.most:g} characters; got {len(value)}" if too_long else ""
        number: Any = value
        low, high = self.least is not None and number < self.least, self.most is not None and number > self.most
        if not (low or high or number != number) and not (self.multiple_of and number % self.multiple_of):
            return ""
        return f"must be {self._range()}; got {number}"

    def _range(self) -> str:
        divides = f"a multiple of {self.multiple_of} " if self.multiple_of > 1 else ""
        if self.least is not None and self.most is not None:
            return f"{divides}from {self.least:g} to {self.most:g}"
        if self.most is not None:
            return f"{divides}at most {self.most:g}"
        return f"{divides}at least {self.least:g}" if self.least is not None else divides.strip() or "a number"
