"""Cuts a text that is still being written where its sentences end.

A sentence ends at a mark with white space behind it, which belongs to it, or at a mark of Chinese or Japanese with any
character behind it, or at a newline. So nothing ends inside of `3.5` or an address, and where a text is cut does not
depend on the pieces in which it arrives.
"""

from __future__ import annotations

import re

LONGEST = 400  # characters of a piece: half a minute of speech
CLOSERS = r"[\"'”’»)\]}」』）】》〉]*+"
END = re.compile(rf"[.!?…]++{CLOSERS}\s|[。！？][。！？…]*+{CLOSERS}(?=.)|\n", re.S)
CLAUSE, SPACE = re.compile(r"[,;:—–]\s|[，、；：]"), re.compile(r"\s")
# Words behind which a full stop ends no sentence: initials, numbers such as those of a list, and these.
SHORTENED = re.compile(
    r"\b(?:\w|\d\d|approx|bzw|ca|capt|cf|co|col|dr|etc|evtl|fig|ggf|hr|inc|jr|ltd|mme|mrs?|ms|mt|nr|prof|rev|sr|st|usw|vs)"
    r"\Z",
    re.I,
)
SHORTENED_CHARACTERS = 8  # that show such a word


class SentenceCutter:
    """Takes a text in any pieces and gives its sentences; together they are the text, with all its white space.

    Args:
        longest: characters after which a sentence is cut at the end of a clause, else at a space, else in a word.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self.rest = ""
        """The sentence that has not ended."""

    def append(self, text: str) -> list[str]:
        """Add text; returns the sentences that have ended."""
        text, begin, found = self.rest + text, 0, []
        while end := self._end(text, begin):
            found.append(text[begin:end])
            begin = end
        self.rest = text[begin:]
        return found

    def flush(self) -> list[str]:
        """End the sentence that has not ended, if there is one."""
        rest, self.rest = self.rest, ""
        return [rest] if rest else []

    def _end(self, text: str, begin: int) -> int:
        """Where the sentence that begins at `begin` ends; 0 if that is not known yet."""
        limit = begin + self._longest
        for mark in END.finditer(text, begin, limit + 1):
            if mark.end() <= limit and not _shortens(text[begin : mark.start()], mark[0]):
                return mark.end()
        if len(text) <= limit:
            return 0
        for pattern, least in ((CLAUSE, begin + self._longest // 2), (SPACE, begin)):
            if ends := [place.end() for place in pattern.finditer(text, least, limit)]:
                return ends[-1]
        return limit


def _shortens(before: str, mark: str) -> bool:
    """Whether a full stop ends no sentence but `Dr.`, an initial, `e.g.`, or the number of a list."""
    is_full_stop = mark.startswith(".") and not mark.startswith("..") and "\n" not in mark
    return is_full_stop and SHORTENED.search(before[-SHORTENED_CHARACTERS:]) is not None


def pieces_of(text: str) -> list[str]:
    """Cut a whole text into pieces of whole sentences, as many in each as `LONGEST` characters hold."""
    cutter, pieces = SentenceCutter(), [""]
    for sentence in (*cutter.append(text), *cutter.flush()):
        if pieces[-1] and len(pieces[-1]) + len(sentence) > LONGEST:
            pieces.append("")
        pieces[-1] += sentence
    return pieces


def speakable(text: str) -> str:
    """What a model is given of a piece of a text: nothing, if there is nothing in it to say."""
    return text.strip() if any(map(str.isalnum, text)) else ""
