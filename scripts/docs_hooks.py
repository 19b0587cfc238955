"""A hook of mkdocs: shows state machines as tables without loading a script."""

from __future__ import annotations

import re
from typing import Any

DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```\n", re.M | re.S)
ARROW = re.compile(r"^ *(\S+) --> (\S+?)(?:: (\S+))?$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the diagrams of architecture.md, which GitHub draws, by tables; to draw them would load a script."""
    return DIAGRAM.sub(_table, markdown)


def _table(diagram: re.Match[str]) -> str:
    rows = [f"| {source} | {event or ''} | {target} |" for source, target, event in ARROW.findall(diagram[1])]
    return "\n".join(["| From | Event | To |", "|---|---|---|", *rows, ""]).replace("[*]", "·")
