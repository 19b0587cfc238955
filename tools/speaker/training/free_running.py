"""Greedy answers to what is held out, all at once: texts of the thinker, codes of the talker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.speaker.codec import edit_distance, phones_of
from tools.speaker.training.decoder import Cache, Talker, TextThinker
from tools.speaker.training.utterances import Utterances, sources_of

REPLY_TOKENS, CODES = 64, 420
FEW_TOKENS, FEW_CODES = 8, 60  # on a CPU


@torch.no_grad()
def replies(thinker: TextThinker, asked: list[list[int]], limit: int, end: int, device: str) -> list[list[int]]:
    """Returns the thinker's greedy replies to prompts, without their end."""
    ids = torch.zeros(len(asked), max(map(len, asked)) + limit + 1, dtype=torch.long)
    for row, prompt in enumerate(asked):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids, rows = ids.to(device), torch.arange(len(asked), device=device)
    at = torch.tensor([len(prompt) for prompt in asked], device=device)
    done = torch.zeros(len(asked), dtype=torch.bool, device=device)
    for _ in range(limit):
        hidden = thinker.hidden(thinker.model.embed_tokens(ids[:, : int(at.max())]))
        chosen = thinker.lm_head(hidden[rows, at - 1]).argmax(-1)
        ids[rows, at] = torch.where(done, end, chosen)
        done |= chosen == end
        at = at + 1
        if bool(done.all()):
            break
    tails = [row[len(prompt) : int(last)] for row, prompt, last in zip(ids.tolist(), asked, at, strict=True)]
    return [tail[: tail.index(end)] if end in tail else tail for tail in tails]


def exact_replies(thinker: TextThinker, checks: Sequence[dict[str, Any]], end: int, device: str, few: bool) -> str:
    """Returns how many replies are exact, group by group."""
    said = replies(thinker, [check["asked"] for check in checks], FEW_TOKENS if few else REPLY_TOKENS, end, device)
    groups: dict[str, list[bool]] = {}
    for check, reply in zip(checks, said, strict=True):
        groups.setdefault(check["group"], []).append(reply == check["reply"])
    return ", ".join(f"{name} {sum(right)} of {len(right)}" for name, right in groups.items())


@torch.no_grad()
def say(
    thinker: TextThinker, talker: Talker, held_out: Sequence[dict[str, Any]], feed: Utterances, limit: int
) -> list[list[int]]:
    """Returns the talker's greedy codes of texts, without their end."""
    device, count = feed.device, len(held_out)
    asked, reply = [text["asked"] for text in held_out], [text["reply"] for text in held_out]
    longest = max(map(len, asked))
    ids = torch.zeros(count, max(len(a) + len(b) for a, b in zip(asked, reply, strict=True)) + 1, dtype=torch.long)
    for row, (a, b) in enumerate(zip(asked, reply, strict=True)):
        ids[row, : len(a) + len(b) + 1] = torch.tensor([*a, *b, feed.stored.end])
    voice = torch.tensor([feed.voices[text["voice"]] for text in held_out], device=device)
    rows = feed.rows_of(thinker, ids.to(device), voice)
    p, r = (torch.tensor([len(row) for row in lists], device=device)[:, None] for lists in (asked, reply))
    begin, total = longest + 2, longest + 2 + limit
    cell = torch.arange(total, device=device)
    place = cell[None] - (longest - p)  # all prompts end at the same cell
    source = sources_of(place, p, r, ids.shape[1]).clamp(min=0)
    text = torch.gather(rows, 1, source[..., None].expand(-1, -1, rows.shape[-1]))
    code = torch.zeros(count, begin, dtype=torch.long, device=device)
    has_code = torch.zeros(count, begin, device=device)
    code[:, longest], code[:, longest + 1], has_code[:, longest:] = feed.pad, feed.start, 1
    real, order = place >= 0, cell[None] <= cell[:begin, None]
    mask = (order[None] & real[:, None]) | (cell[None] == cell[:begin, None])[None]
    cache, one = Cache(count, total, device), torch.ones(count, 1, device=device)
    hidden = talker.hidden(
        text[:, :begin], code, has_code, cache.at(0, mask[:, None]), place[:, None, :begin].clamp(min=0)
    )
    banned = torch.arange(len(talker.codec_head.weight), device=device) >= feed.sounds
    banned[feed.finish] = False
    said = torch.full((count, limit), feed.finish, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(limit):
        chosen: Tensor = talker.codec_head(hidden[:, -1]).float().masked_fill(banned, -1e9).argmax(-1)
        said[:, step] = torch.where(done, feed.finish, chosen)
        done |= chosen == feed.finish
        at = begin + step
        if step % 16 == 0 and bool(done.all()):
            break
        seen = (real & (cell[None] <= at))[:, None, None]
        hidden = talker.hidden(
            text[:, at : at + 1], chosen[:, None], one, cache.at(at, seen), place[:, None, at : at + 1]
        )
    return [row[: row.index(feed.finish)] if feed.finish in row else row for row in said.tolist()]


def phone_errors(thinker: TextThinker, talker: Talker, feed: Utterances, few: bool) -> str:
    """Returns how many phones of held-out texts are wrong, for each group and voice, as parts of one."""
    held_out = feed.stored.held_out["talker"][:: 30 if few else 1]
    counts: dict[str, list[int]] = {}
    for text, codes in zip(held_out, say(thinker, talker, held_out, feed, FEW_CODES if few else CODES), strict=True):
        wanted, errors = phones_of(text["codes"]), counts.setdefault(f"{text['group']} {text['voice']}", [0, 0])
        errors[0] += edit_distance(wanted, phones_of(codes))
        errors[1] += len(wanted)
    return ", ".join(f"{name} {wrong / max(1, total):.4f}" for name, (wrong, total) in counts.items())
