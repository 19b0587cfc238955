"""Tests of what the tensors of a picture's step become."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.diffusion import picture_events
from omni_actors.engine.rows import to_torch
from omni_actors.errors import ModelOutputInvalid
from omni_actors.stage.engine_interface import ImageEvent, LatentsEvent


def test_a_step_shows_latents_as_a_preview_and_the_last_one_gives_those_of_the_picture():
    (shown,) = picture_events("a", {"preview": torch.zeros(4, 2, 2)}, preview=False)
    (last,) = picture_events("a", {"latents": torch.ones(4, 2, 2)}, preview=False)
    assert isinstance(shown, LatentsEvent)
    assert shown.preview
    assert isinstance(last, LatentsEvent)
    assert not last.preview
    assert torch.equal(to_torch(last.latents), torch.ones(4, 2, 2))


def test_a_picture_is_a_preview_if_its_job_is_one():
    for preview in (True, False):
        (event,) = picture_events("a", {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}, preview=preview)
        assert isinstance(event, ImageEvent)
        assert event.preview is preview


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"latents": torch.tensor([1.0, float("nan")])}, "NaN or infinite"),
        ({"preview": torch.tensor([1.0, float("inf")])}, "NaN or infinite"),
        ({"image": torch.zeros(8, 8, 3)}, "float32"),
        ({"image": torch.zeros(8, 8, dtype=torch.uint8)}, r"\[8, 8\]"),
    ],
)
def test_what_cannot_be_shown_is_an_error_of_the_model(result, message):
    with pytest.raises(ModelOutputInvalid, match=message):
        picture_events("a", result, preview=False)
