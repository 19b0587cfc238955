"""Hooks of mkdocs: list the decisions in the navigation, and show state machines as tables without loading a script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```\n", re.M | re.S)
ARROW = re.compile(r"^ *(\S+) --> (\S+?)(?:: (\S+))?$", re.M)


def on_config(config: Any) -> Any:
    """Expand `adr/` in the navigation to the pages of that folder."""
    docs = Path(config["docs_dir"])
    config["nav"] = [_expand(entry, docs) for entry in config["nav"]]
    return config


def _expand(entry: Any, docs: Path) -> Any:
    if isinstance(entry, dict):
        ((title, content),) = entry.items()
        if isinstance(content, list):
            return {title: [_expand(item, docs) for item in content]}
        if content.endswith("/"):
            return {title: [f"{content}{path.name}" for path in sorted((docs / content).glob("*.md"))]}
    return entry


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the diagrams of state-machines.md, which GitHub draws, by tables; to draw them would load a script."""
    return DIAGRAM.sub(_table, markdown)


def _table(diagram: re.Match[str]) -> str:
    rows = [f"| {source} | {event or ''} | {target} |" for source, target, event in ARROW.findall(diagram[1])]
    return "\n".join(["| From | Event | To |", "|---|---|---|", *rows, ""]).replace("[*]", "·")
