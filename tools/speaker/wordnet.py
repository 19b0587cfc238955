"""Sentences, meanings and words of WordNet (Debian: wordnet-base; licence: Princeton, permissive)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.speaker import SpeakerError

FOLDER = Path("/usr/share/wordnet")
KINDS = ("noun", "verb", "adj", "adv")
PLAIN = re.compile(r"[A-Za-z,'\-?!. ]+")
LONGEST = 90
COMMON_WORDS, MEANINGS = 24_000, 600
# Words that a demonstration should not say. A sentence with one of them is left out.
LEFT_OUT = re.compile(
    r"\b(ass|arse|bastard|bitch|breasts?|cock|corpse|cunt|damn|dick|drugs?|fuck|gay|genital|hell|heroin|homosexual|incest|"
    r"intercourse|jew|kill|lesbian|masturbat|murder|nazi|negro|nigg|orgasm|penis|porn|prostitut|rape|rapist|retard|semen|"
    r"sex|shit|slave|slut|suicid|terroris|testic|tortur|urin|vagina|whore)\w*\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WordNet:
    """What the corpus takes: example sentences, the meaning of common nouns, and words from common to rare."""

    sentences: list[str]
    meanings: dict[str, str]
    words: list[str]


def as_sentence(text: str) -> str:
    """Returns a text with a capital letter and a full stop; "" for one without words."""
    text = " ".join(text.split()).strip("`'\"-;:, ")
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def _synsets(folder: Path) -> Iterator[tuple[str, str, list[str], str]]:
    """Yields (kind, offset, words, gloss) of everything."""
    for kind in KINDS:
        for line in (folder / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue  # the licence stands at the top
            head, gloss = line.split("|", 1)
            fields = head.split()
            yield kind, fields[0], fields[4 : 4 + 2 * int(fields[3], 16) : 2], gloss


def _first_senses(folder: Path) -> dict[str, str]:
    """Returns the offset of each noun's commonest meaning."""
    senses = {}
    for line in (folder / "index.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            fields = line.split()
            senses[fields[0]] = fields[6 + int(fields[3])]
    return senses


def read_wordnet(folder: Path = FOLDER) -> WordNet:
    """Reads the data base. Raises SpeakerError if it is not installed."""
    if not (folder / "data.noun").exists():
        raise SpeakerError(f"{folder} holds no WordNet: apt-get install wordnet-base.")
    senses, counts = _first_senses(folder), Counter[str]()
    sentences: list[str] = []
    meanings: dict[str, str] = {}
    known: set[str] = set()
    for kind, offset, words, gloss in _synsets(folder):
        counts.update(re.findall(r"[a-z']+", gloss.lower()))
        known.update(word for word in words if word.isalpha() and word.islower())
        for example in re.findall(r'"([^"]+)"', gloss):
            example = example.replace(";", ",")
            if 3 <= len(example.split()) <= 14 and len(example) < LONGEST and PLAIN.fullmatch(example):
                sentences.append(as_sentence(example))
        definition = re.sub(r"\([^)]*\)", "", re.split(r'[;"]', gloss)[0]).strip()
        short = 3 <= len(definition.split()) <= 11 and re.fullmatch(r"[a-z,'\- ]+", definition)
        for word in words if kind == "noun" and short else ():
            if word.isalpha() and word.islower() and len(word) < 11 and senses.get(word) == offset:
                meanings[word] = definition
    allowed = {word: text for word, text in meanings.items() if not LEFT_OUT.search(f"{word} {text}")}
    common = [word for word, _ in counts.most_common() if word in known and not LEFT_OUT.search(word)]
    explained = [word for word in common if word in allowed and len(word) > 2]
    return WordNet(
        sentences=[sentence for sentence in dict.fromkeys(sentences) if not LEFT_OUT.search(sentence)],
        meanings={word: allowed[word] for word in explained[:MEANINGS]},
        words=common[:COMMON_WORDS],
    )
