"""Hooks of mkdocs: decisions into the navigation, state machines as tables, nothing from other hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DIAGRAM = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```\n", re.M | re.S)
ARROW = re.compile(r"^ *(\S+) --> (\S+?)(?:: (\S+))?$", re.M)


def on_config(config: Any) -> Any:
    """`adr/` in the navigation stands for the pages of that folder."""
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
    """The diagrams of state-machines.md are drawn by GitHub; the program for that is not to be loaded here."""
    return DIAGRAM.sub(_table, markdown)


def _table(diagram: re.Match[str]) -> str:
    rows = [f"| {source} | {event or ''} | {target} |" for source, target, event in ARROW.findall(diagram[1])]
    return "\n".join(["| From | Event | To |", "|---|---|---|", *rows, ""]).replace("[*]", "·")
