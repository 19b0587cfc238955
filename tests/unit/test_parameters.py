"""Parameters that a model declares are all that a request may set, within their limits."""

from __future__ import annotations

import pytest

from omni_actors.config import check_parameters
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import Parameter, StageParams

WIDTH = Parameter("width", "int", least=64, most=2048, multiple_of=16)
DECLARED = (
    WIDTH,
    Parameter("guidance_scale", "float", least=1.0),
    Parameter("negative_prompt", "text", most=8),
    Parameter("mode", "text", choices=("soft", "hard")),
    Parameter("sharpen", "bool"),
    Parameter("layers", "int", multiple_of=2),
    Parameter("shift", "float", most=9.0),
)


@pytest.mark.parametrize(
    "params",
    [
        StageParams(),
        StageParams(width=1024, guidance_scale=1.0, negative_prompt="x" * 8, seed=7),
        StageParams(extra_args={"mode": "soft", "sharpen": True, "layers": -4, "shift": 3}),
    ],
)
def test_values_within_the_limits_are_taken(params: StageParams) -> None:
    check_parameters("dit", DECLARED, params)


@pytest.mark.parametrize(
    ("params", "field", "text"),
    [
        (StageParams(width=48), "width", "must be a multiple of 16 from 64 to 2048; got 48."),
        (StageParams(width=2064), "width", "must be a multiple of 16 from 64 to 2048; got 2064."),
        (StageParams(width=100), "width", "must be a multiple of 16 from 64 to 2048; got 100."),
        (StageParams(guidance_scale=0.5), "guidance_scale", "must be at least 1; got 0.5."),
        (StageParams(negative_prompt="x" * 9), "negative_prompt", "may have at most 8 characters; got 9."),
        (StageParams(height=64), "height", "has no parameter 'height'."),
        (StageParams(extra_args={"shft": 2.0}), "shft", "has no parameter 'shft'. Did you mean 'shift'?"),
        (StageParams(extra_args={"shift": float("nan")}), "shift", "must be at most 9; got nan."),
        (StageParams(extra_args={"shift": 9.5}), "shift", "must be at most 9; got 9.5."),
        (StageParams(extra_args={"shift": "3"}), "shift", "must be a number."),
        (StageParams(extra_args={"layers": 3}), "layers", "must be a multiple of 2; got 3."),
        (StageParams(extra_args={"layers": 2.0}), "layers", "must be a whole number."),
        (StageParams(extra_args={"layers": True}), "layers", "must be a whole number."),
        (StageParams(extra_args={"sharpen": 1}), "sharpen", "must be true or false."),
        (StageParams(extra_args={"mode": "loud"}), "mode", "must be one of soft, hard."),
    ],
)
def test_other_values_are_refused_with_the_name_and_the_limits(params: StageParams, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters("dit", DECLARED, params)
    assert caught.value.field == field
    assert text in caught.value.message
