"""Families of models as tables: `data/FAMILY.json`.

`sizes` has the published value and the tiny one of each name; `null` follows from other sizes. In `configuration`,
`"$name"` stands for a size, the name of a token or a role for its id, and `"..."` for all fields of a size that is
itself a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.checkpoints.tokenizer import TokenLayout, chat_template

Sizes = Mapping[str, Any]
DATA = Path(__file__).parent / "data"


def filled(template: Any, names: Mapping[str, Any]) -> Any:
    """Returns a template with every name in it replaced by its value."""
    if isinstance(template, str):
        return filled(names[template], names) if template in names else template
    if isinstance(template, list):
        return [filled(each, names) for each in template]
    if isinstance(template, dict):
        made: dict[str, Any] = {}
        for key, value in template.items():
            made |= filled(value, names) if key == "..." else {key: filled(value, names)}
        return made
    return template


class Family:
    """One family, with its sizes as published and of the tiny checkpoint that all tests share.

    Args:
        name: of the table in `data/`.
        derive: returns the sizes that follow from those that are given, for a tiny checkpoint.
    """

    def __init__(self, name: str, derive: Callable[[Sizes], dict[str, Any]] = dict) -> None:
        self.table: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        tokens = self.table["tokens"]  # or the family that has the same ones
        self.tokens: dict[str, Any] = tokens if isinstance(tokens, dict) else Family(tokens).tokens
        self.derive = derive
        self.published: Sizes = {key: pair[0] for key, pair in self.table["sizes"].items() if pair[0] is not None}
        self.tiny: Sizes = {key: pair[1] for key, pair in self.table["sizes"].items() if pair[1] is not None}

    def tiny_sizes(self, given: Sizes | None = None) -> Sizes:
        """Returns the sizes of a tiny checkpoint; those that are given take the place of the usual ones."""
        chosen = {**self.tiny, **(given or {})}
        return {**self.derive(chosen), **chosen}

    def layout(self, sizes: Sizes) -> TokenLayout:
        """Returns the ids of texts."""
        tokens = self.tokens
        return TokenLayout(
            vocab_size=sizes["vocabulary"],
            first_special=sizes["first_special"],
            first_speech=sizes.get("first_speech", sizes["first_special"]),
            voices=sizes.get("voices", {}),
            fixed=sizes.get("fixed", {}),
            special=tuple(tokens["special"]),
            speech=tuple(tokens["speech"]),
            written=tuple(tokens.get("written", ())),
            named=tokens["named"],
            template="".join(tokens.get("template", ())) or chat_template(tokens["named"], tokens["system"]),
        )

    def fill(self, part: str, sizes: Sizes, roles: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Returns a part of the table with ids and sizes.

        Args:
            roles: the ids of the words that name the roles of a chat.
        """
        ids = self.layout(sizes).ids()
        made: dict[str, Any] = filled(
            self.table[part], {**ids, **(roles or {}), **{f"${name}": value for name, value in sizes.items()}}
        )
        return made
