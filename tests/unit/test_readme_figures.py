"""README's figures, and those of the known limits, are those of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import pytest

from tests.support.paths import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
BENCHMARKS = (REPOSITORY / "docs" / "benchmarks.md").read_text()
OUTSIDE = "### From outside, over HTTP"
BESIDE = "### Beside vllm-omni"
QWEN3 = "### Qwen3-Omni-30B-A3B"
TTS = "### Qwen3-TTS 1.7B"
PICTURES = "## Pictures through a pipeline"
MS = Decimal("0.001")
SPOKEN = Decimal("10.16")  # seconds: 127 frames of 80 ms, an answer of Qwen3-Omni in these benchmarks


def row(page: str, heading: str, label: str) -> list[str]:
    """The cells of the first row below `heading` that begins with `label`, which is the first of them."""
    section = re.split(r"\n#+ ", page.split(f"\n{heading}", 1)[1])[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def figures(cell: str) -> list[Decimal]:
    return [Decimal(figure) for figure in re.findall(r"\d+(?:\.\d+)?", cell)]


def rounded_as(shown: Decimal, measured: Decimal) -> Decimal:
    return round(measured, -int(shown.as_tuple().exponent))


def expect(shown: Sequence[Decimal], measured: Sequence[Decimal]) -> None:
    """Each figure is the measured one, rounded to the digits that are shown."""
    assert list(shown) == [rounded_as(*pair) for pair in zip(shown, measured, strict=True)]


# Row of README's table -> of each of its columns: heading, row, cell, figure in the cell, and its unit.
FIGURES = {
    "first sound, 1 request": [
        *((OUTSIDE, "c=1", 2, 1, 1), (BESIDE, "TTFA", 2, 0, 1)),
        *((QWEN3, "c=1", 2, 0, MS), (QWEN3, "c=1", -1, 0, MS)),
    ],
    "whole answer, 1 request": [
        *((OUTSIDE, "c=1", 6, 0, 1), (BESIDE, "end to end", 2, 0, 1)),
        *((QWEN3, "c=1", 5, 0, SPOKEN), (QWEN3, "c=1", -1, 1, SPOKEN)),
    ],
    "answers per second, 32 concurrent requests": [
        *((OUTSIDE, "c=32", 5, 0, 1), (BESIDE, "req/s", 2, 1, 1)),
        *((QWEN3, "c=32", 6, 0, 1), (QWEN3, "c=32", -1, -1, 1)),
    ],
}


@pytest.mark.parametrize(("label", "places"), FIGURES.items())
def test_the_table(label: str, places: list[tuple[str, str, int, int, Decimal]]) -> None:
    measured = [figures(row(BENCHMARKS, *place[:2])[place[2]])[place[3]] * place[4] for place in places]
    expect([figures(cell)[0] for cell in row(README, "## Performance", label)[1:]], measured)


def test_the_sentences_below_it() -> None:
    section = README[README.index("## Performance") :]
    found = re.search(
        r"begins to speak after (\d+) ms, and says (\d+) answers of 10 s per second to 64 listeners, none .*"
        r"takes ([\d.]+) s with Qwen-Image-2\.1 \(40 steps; diffusers ([\d.]+) s\), "
        r"([\d.]+) s with Z-Image-Turbo \(8 steps; diffusers ([\d.]+) s\), "
        r"and ([\d.]+) s with FLUX\.2 klein on an H100 \(4 steps; diffusers ([\d.]+) s without",
        " ".join(section[: section.index("\n## ")].split()),
    )
    assert found, section
    one, many = row(BENCHMARKS, TTS, "c=1"), row(BENCHMARKS, TTS, "c=64")
    qwen, turbo = (row(BENCHMARKS, PICTURES, f"{name} 1024x1024") for name in ("Qwen-Image-2.1", "Z-Image-Turbo"))
    klein = row(BENCHMARKS, PICTURES, "1024x1024, c=1")
    cells = (one[1], many[5], qwen[1], qwen[6], turbo[1], turbo[6], klein[1], klein[7])
    expect([Decimal(figure) for figure in found.groups()], [figures(cell)[0] for cell in cells])
    assert many[3] == "0 of 128"


def test_how_soon_people_who_talk_hear_an_answer() -> None:
    shown = re.search(r"(\d+) people talk to Qwen3-Omni on one H200 .* (\d\.\d+) s after", README)
    expect([Decimal(shown[2])], figures(row(BENCHMARKS, "### Voices whose answers", f"{shown[1]} ")[2])[:1])
