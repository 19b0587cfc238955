"""A chart as an SVG picture or as a page with it. Needs nothing but a browser to be looked at."""

from __future__ import annotations

import html
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from omni_actors.telemetry.chart import Chart

COLOURS = {
    "waiting": "#e3e6eb",
    "gathering": "#c9d3e4",
    "queued": "#f2c14e",
    "first output": "#f08a4b",
    "output": "#3d8bd4",
    "ending": "#8e9aab",
}
HOP_COLOUR = "#4a5c6d"
HOP_BAR_COLOUR = "#cdd8e2"
MARK_COLOUR = "#b03a48"
FAILED_COLOUR = "#b03a48"
TEXT_COLOUR = "#1b2430"
WIDTH, LEFT, RIGHT = 960, 168, 20
TOP, ROW, BAR, HOP_ROW = 74, 30, 18, 17
HOP_WORDS = 200  # width of what is said about a hop
TICKS = (1, 2, 5)


def svg(chart: Chart) -> str:
    """The picture as text: a row per stage, below them one per hop, vertical lines where something happened."""
    below = TOP + ROW * len(chart.stages) + 12
    height = below + HOP_ROW * len(chart.hops) + 40
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": str(WIDTH),
            "height": str(height),
            "viewBox": f"0 0 {WIDTH} {height}",
            "font-family": "system-ui, sans-serif",
            "font-size": "12",
        },
    )
    SubElement(root, "title").text = _printable(f"Timeline of request {chart.id}")
    _box(root, 0, 0, WIDTH, height, "#ffffff")
    _text(root, 12, 22, f"request {chart.id}: {chart.outcome} after {duration(chart.seconds)}", weight="600")
    _legend(root)
    _axis(root, chart, height - 24)
    _marks(root, chart, height - 30)
    _stages(root, chart)
    _hops(root, chart, below)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _marks(root: Element, chart: Chart, bottom: float) -> None:
    for index, mark in enumerate(chart.events):
        x = _x(chart, mark.at)
        line = _line(root, x, TOP - 14, x, bottom, MARK_COLOUR)
        line.set("stroke-dasharray", "2 3")
        SubElement(line, "title").text = _printable(f"{mark.name} at {duration(mark.at)} {mark.detail}".rstrip())
        if mark.name.startswith("first"):  # the others crowd at both ends
            _text(root, x + 3, TOP - 4 - 10 * (index % 2), mark.name, size=10, colour=MARK_COLOUR)


def _stages(root: Element, chart: Chart) -> None:
    for row, stage in enumerate(chart.stages):
        y = TOP + row * ROW
        name = f"{stage.stage}/{stage.replica}" + (f" attempt {stage.attempt}" if stage.attempt else "")
        done = stage.outcome == "done"
        _text(root, LEFT - 8, y + 13, name, anchor="end", colour=TEXT_COLOUR if done else FAILED_COLOUR)
        for phase in stage.phases:
            bar = _box(root, _x(chart, phase.at), y, _width(chart, phase.seconds), BAR, COLOURS[phase.name])
            SubElement(bar, "title").text = _printable(f"{name} {phase.name}: {duration(phase.seconds)}")
        if not done:
            x = _x(chart, stage.at + stage.seconds) + 4
            _text(root, x, y + 13, stage.outcome, size=10, colour=FAILED_COLOUR)


def _hops(root: Element, chart: Chart, top: float) -> None:
    for row, hop in enumerate(chart.hops):
        y = top + row * HOP_ROW
        _text(root, LEFT - 8, y + 9, f"{hop.source} → {hop.target}", anchor="end", size=10, colour=HOP_COLOUR)
        begin = _x(chart, hop.at)
        _box(root, begin, y, _width(chart, hop.seconds), 12, HOP_BAR_COLOUR)
        words = f"{hop.messages} messages, {size(hop.bytes)}, first {duration(hop.first_latency)}"
        _text(root, min(begin + 4, WIDTH - HOP_WORDS), y + 9, words, size=9, colour=HOP_COLOUR)


def page(chart: Chart) -> str:
    """The picture in a page of HTML, with the figures as a table."""
    rows = [
        f"<tr><td>{_escaped(f'{stage.stage}/{stage.replica}')}</td><td>{_escaped(stage.outcome)}</td>"
        f"<td>{duration(stage.at)}</td><td>{duration(stage.seconds)}</td>"
        f"<td>{stage.input_tokens}</td><td>{stage.output_tokens}</td></tr>"
        for stage in chart.stages
    ]
    picture = svg(chart).partition("\n")[2]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Request {_escaped(chart.id)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}</style>"
        f"</head><body>\n{picture}"
        "<table><tr><th>stage</th><th>outcome</th><th>begins</th><th>takes</th><th>tokens in</th><th>out</th></tr>"
        f"{''.join(rows)}</table>\n<p>trace {_escaped(chart.trace_id)}</p></body></html>\n"
    )


def duration(seconds: float) -> str:
    """With three digits that matter: `640 µs`, `12.3 ms`, `4.56 s`."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{0 if value >= 100 or unit == 'µs' else 1}f} {unit}"
    return f"{seconds:.2f} s"


def size(n_bytes: float) -> str:
    """`44 B`, `7.0 KiB`, `1.5 MiB`."""
    for limit, unit in ((1024, "B"), (1024**2, "KiB"), (1024**3, "MiB")):
        if n_bytes < limit:
            value = n_bytes / (limit / 1024)
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
    return f"{n_bytes / 1024**3:.1f} GiB"


# ---------------------------------------------------------------------------------------------------------------------


def _x(chart: Chart, at: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, at / chart.seconds if chart.seconds else 0.0)


def _width(chart: Chart, seconds: float) -> float:
    return max(0.75, (WIDTH - LEFT - RIGHT) * (seconds / chart.seconds if chart.seconds else 0.0))


def _axis(root: Element, chart: Chart, y: float) -> None:
    step = _step(chart.seconds)
    count = int(chart.seconds / step) if step else 0
    for index in range(count + 1):
        x = _x(chart, index * step)
        _line(root, x, TOP - 8, x, y - 8, "#eef0f3")
        _text(root, x, y + 6, duration(index * step) if index else "0", anchor="middle", size=10, colour="#5b6570")


def _step(seconds: float) -> float:
    """A round length of which at most ten fit."""
    unit = 1e-6
    while seconds > 0 and unit < 1e9:
        for tick in TICKS:
            if seconds / (tick * unit) <= 10:
                return tick * unit
        unit *= 10
    return 0.0


def _legend(root: Element) -> None:
    x = LEFT
    for name, colour in COLOURS.items():
        _box(root, x, 34, 11, 11, colour)
        _text(root, x + 16, 44, name, size=11)
        x += 34 + 7 * len(name)


def _box(root: Element, x: float, y: float, width: float, height: float, colour: str) -> Element:
    sizes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return SubElement(root, "rect", {**sizes, "fill": colour})


def _line(root: Element, x1: float, y1: float, x2: float, y2: float, colour: str) -> Element:
    ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
    return SubElement(root, "line", {**ends, "stroke": colour})


def _text(
    root: Element,
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    colour: str = TEXT_COLOUR,
    weight: str = "400",
) -> None:
    SubElement(
        root,
        "text",
        {
            "x": f"{x:.2f}",
            "y": f"{y:.2f}",
            "text-anchor": anchor,
            "font-size": str(size),
            "fill": colour,
            "font-weight": weight,
        },
    ).text = _printable(text)


def _escaped(text: str) -> str:
    return html.escape(_printable(text))


def _printable(text: str) -> str:
    """XML has no place for control characters, not even escaped; ids are the clients' choice."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
