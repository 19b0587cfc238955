"""The events that the tensors of a picture's step become, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omni_actors.engine.tensors import to_host
from omni_actors.errors import ModelOutputInvalid
from omni_actors.stage.engine_interface import ImageEvent, LatentsEvent, StreamEvent

KNOWN = frozenset({"audio", "image", "latents", "preview", "error"})  # to the engine, in the result of a step


def picture_events(request_id: str, result: Mapping[str, Any], *, preview: bool) -> list[ImageEvent | LatentsEvent]:
    """Events for the CPU tensors of a `StepResult`; none if it has neither a picture nor latents.

    Args:
        preview: whether the job whose result it is makes a preview. A result of a step that is not the last has its
            latents under the name `preview`, and they are those of one in any case.

    Raises:
        ModelOutputInvalid: the latents hold NaN or infinite values, or a picture is not u8 [height, width, 3 or 4].
    """
    events: list[ImageEvent | LatentsEvent] = []
    for name in ("preview", "latents"):
        latents: torch.Tensor | None = result.get(name)
        if latents is not None:
            if not torch.isfinite(latents).all():
                raise ModelOutputInvalid("The model's latents hold NaN or infinite values.")
            events.append(LatentsEvent(request_id, to_host(latents), preview=preview or name == "preview"))
    pixels: torch.Tensor | None = result.get("image")
    if pixels is not None:
        if pixels.dtype is not torch.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
            raise ModelOutputInvalid(
                f"The model's picture is {pixels.dtype} {list(pixels.shape)}, not u8 [h, w, 3 or 4]."
            )
        events.append(ImageEvent(request_id, to_host(pixels), preview=preview))
    return events


def other_tensors(request_id: str, result: Mapping[str, Any], *, final: bool) -> list[StreamEvent]:
    """The event with those CPU tensors of a `StepResult` that only a later stage knows; none if there are none.

    Args:
        final: whether it is the request's last.

    Raises:
        ModelOutputInvalid: one holds NaN or infinite values.
    """
    others = {name: tensor for name, tensor in result.items() if name not in KNOWN}
    for name, tensor in others.items():
        if not torch.isfinite(tensor).all():
            raise ModelOutputInvalid(f"The model's {name} holds NaN or infinite values.")
    hosted = {name: to_host(tensor) for name, tensor in others.items()}
    return [StreamEvent(request_id, tensors=hosted, final=final)] if hosted else []
