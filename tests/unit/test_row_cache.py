"""Rows of the prefix cache: what is kept, what makes room, who waits for whose rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from omni_actors.engine.rows import FollowedRows, RowCache

SIZE, WIDTH = 4, 2
BLOCK_BYTES = SIZE * WIDTH * 4


@dataclass
class Asked:
    """Stands for vLLM's request."""

    request_id: str
    block_hashes: list[str]
    num_prompt_tokens: int = field(default=0)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.block_hashes) * SIZE + 1


def rows(first: int, last: int) -> torch.Tensor:
    """Row i holds the number i."""
    return torch.arange(first, last, dtype=torch.float32).unsqueeze(1).repeat(1, WIDTH)


def follow(cache: RowCache, name: str, blocks: str, prompt: int = 0) -> FollowedRows:
    return FollowedRows(cache, Asked(name, list(blocks), prompt))


def computed(followed: FollowedRows, first: int, last: int) -> tuple[int, list[float]]:
    """What is passed on when positions [first, last) are computed: the first position, and each row's number."""
    emitted = followed.complete({"start": first, "rows": rows(first, last)})
    return emitted["start"], emitted["rows"][:, 0].tolist()


@pytest.mark.parametrize("pieces", [[1] * 18, [3, 5, 7, 3], [4, 4, 4, 4, 2], [17, 1]])
def test_rows_are_kept_by_whole_blocks_however_they_come(pieces: list[int]) -> None:
    cache = RowCache(1 << 20, SIZE)
    request = follow(cache, "r", "abcd", prompt=9)
    request.use(0)
    start = 0
    for piece in pieces:
        assert computed(request, start, start + piece) == (start, list(range(start, start + piece)))
        start += piece
    assert [block[:, 0].tolist() for block in cache.take("abcd")] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert cache.held_bytes == 4 * BLOCK_BYTES


def test_memory_is_bounded_and_the_beginning_of_a_used_prefix_goes_last() -> None:
    cache = RowCache(4 * BLOCK_BYTES, SIZE)
    old = follow(cache, "old", "abc")
    old.use(0)
    computed(old, 0, 13)
    old.close()
    new = follow(cache, "new", "xy")
    new.use(0)
    computed(new, 0, 9)
    assert cache.held_bytes == 4 * BLOCK_BYTES
    assert (cache.covers("abc"), cache.covers("xy")) == (2, 2), "the end of the older prefix made room"
    nothing = RowCache(0, SIZE)
    none = follow(nothing, "none", "abc")
    none.use(0)
    computed(none, 0, 13)
    assert len(nothing) == nothing.held_bytes == 0


def test_who_begins_with_blocks_that_are_being_computed_waits_for_their_rows() -> None:
    cache = RowCache(1 << 20, SIZE)
    first, second, other = follow(cache, "1", "abcd"), follow(cache, "2", "abcx"), follow(cache, "3", "yz")
    assert not first.waits()
    first.use(0)
    assert (first.waits(), second.waits(), other.waits()) == (False, True, False)
    computed(first, 0, 8)
    assert second.waits(), "the third block is still computed"
    computed(first, 8, 12)
    assert not second.waits()
    assert second.use(12) == 12


def test_no_request_waits_for_one_that_has_ended_or_for_rows_that_are_not_kept() -> None:
    cache = RowCache(1 << 20, SIZE)
    first, second = follow(cache, "1", "abcd"), follow(cache, "2", "abcd")
    first.use(0)
    assert second.waits()
    first.close()
    assert not second.waits()
    small = RowCache(2 * BLOCK_BYTES, SIZE)
    first, second = follow(small, "1", "abcd"), follow(small, "2", "abcd")
    first.use(0)
    computed(first, 0, 17)
    assert not second.waits(), "the first block has made room already, and is not computed again"
    unkept = RowCache(0, SIZE)
    follow(unkept, "1", "ab").use(0)
    assert not follow(unkept, "2", "ab").waits()
