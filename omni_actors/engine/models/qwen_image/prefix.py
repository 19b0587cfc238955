"""What is before the picture that is made: a prompt and the pictures that it refers to, computed part by part.

Torch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from omni_actors.errors import EngineError


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a condition that are of one kind.

    Args:
        begin: its first token.
        end: the token after its last.
        reach: the position of its first token along the first axis; a picture has all of its tokens there.
        text: whether it is a text; else it is a picture.
        given: the hidden states of a text [tokens, text_width], or the latents of a picture [channels, height, width].
    """

    begin: int
    end: int
    reach: int
    text: bool
    given: torch.Tensor

    def within(self, begin: int, end: int) -> Run:
        """The part of a text between two tokens of the condition."""
        if not self.text:
            return self
        first, last = max(begin, self.begin), min(end, self.end)
        own = self.given[first - self.begin : last - self.begin]
        return Run(first, last, self.reach + first - self.begin, True, own)


@dataclass(frozen=True)
class Condition:
    """A prompt with the pictures it refers to.

    Args:
        states: hidden states of its text [tokens, text_width], on the CPU.
        lengths: tokens of the text before each picture, and after the last one.
        references: latents of the pictures, f32 [channels, height, width] each, on the CPU.
    """

    states: torch.Tensor
    lengths: tuple[int, ...]
    references: tuple[torch.Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """Of the whole prefix."""
        return len(self.states) + sum(one[0].numel() for one in self.references)

    @property
    def reach(self) -> int:
        """Positions along the first axis that it takes: a picture as many as its longer edge."""
        return len(self.states) + sum(max(one.shape[1:]) for one in self.references)

    def runs(self) -> Iterator[Run]:
        """Its texts, where they are not empty, and its pictures, in their order."""
        begin = reach = 0
        for index, text in enumerate(self.states.split(self.lengths)):
            if len(text):
                yield Run(begin, begin + len(text), reach, True, text)
                begin, reach = begin + len(text), reach + len(text)
            if index < len(self.references):
                latents = self.references[index]
                yield Run(begin, begin + latents[0].numel(), reach, False, latents)
                begin, reach = begin + latents[0].numel(), reach + max(latents.shape[1:])


class Prefix:
    """The keys and values that a condition contributes to every step of its request.

    Attributes:
        given: the condition.
        done: how many of its tokens are computed.
        kept: their keys and values, [layers, 2, tokens, heads, head_width] on the device; None before the first.
    """

    def __init__(self, given: Condition) -> None:
        self.given = given
        self.done = 0
        self.kept: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of the whole prefix."""
        return self.given.tokens

    def until(self, end: int) -> list[Run]:
        """The runs, or parts of them, from the first token that is not computed to this one."""
        return [run.within(self.done, end) for run in self.given.runs() if run.begin < end and run.end > self.done]

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [tokens, heads, head_width]. The prefix has been computed."""
        if self.kept is None:
            raise EngineError("A prefix was used before it was computed.")
        keys, values = self.kept[layer]
        return keys, values

    def free(self) -> None:
        """Free what is kept; it would have to be computed again."""
        self.done, self.kept = 0, None


Part: TypeAlias = Sequence[tuple[Prefix, int]]
"""What is computed at a time: prefixes, each with the token up to which it is computed then."""


def parts(prefixes: Sequence[Prefix], most: int) -> list[tuple[Part, int]]:
    """Cut prefixes into parts, and count the tokens of each.

    A token of a picture sees all of it, so no picture is cut; a text is cut anywhere.

    Args:
        most: tokens of a part, except for one of a single larger picture.
    """
    found: list[tuple[dict[Prefix, int], int]] = [({}, 0)]
    for prefix in prefixes:
        for run in prefix.given.runs():
            longest = most if run.text else run.end - run.begin
            for begin in range(run.begin, run.end, longest):
                end = min(begin + longest, run.end)
                ends, tokens = found[-1]
                if tokens and tokens + end - begin > most:
                    ends, tokens = {}, 0
                    found.append((ends, 0))
                ends[prefix] = end
                found[-1] = ends, tokens + end - begin
    return [(tuple(ends.items()), tokens) for ends, tokens in found]
