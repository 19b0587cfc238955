"""Requests to stages that speak a given text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omni_actors.engine.rows import to_host
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from tests.support.stage_driver import Driver

RATE = 24_000


def text_inputs(text: str) -> StageInputs:
    return StageInputs(prompt=Prompt(messages=(ChatMessage(role="user", content=(ContentPart(text=text),)),)))


def clip_information(samples: np.ndarray, rate: int = RATE, transcript: str | None = None) -> dict[str, Any]:
    more = {} if transcript is None else {"transcript": transcript}
    return {"clip": to_host(torch.from_numpy(samples)), "clip_rate": rate, **more}


def speak(
    driver: Driver,
    name: str,
    text: str,
    *,
    voice: str | None = None,
    seed: int = 0,
    information: Mapping[str, Any],
    **params: Any,
) -> None:
    """Start a request of a talker."""
    request = StageRequest(name, StageParams(**params), seed, voice, information=information)
    driver.engine.start(request, text_inputs(text))


def frames_of(driver: Driver, name: str) -> torch.Tensor:
    """The codes [F, 16] that are to be heard, checked to come in whole frames, without gap or overlap."""
    events = driver.streams(name)
    codes: list[int] = []
    for event in events:
        assert event.start == len(codes)
        codes += event.token_ids
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    return torch.tensor(codes[events[0].scalars.get("unheard", 0) :]).reshape(-1, 16)
