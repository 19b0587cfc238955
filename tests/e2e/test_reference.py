"""The tiny checkpoint that engines are compared with: its answers vary, so that equal ones prove something."""

from __future__ import annotations

import pytest

from tests.support.reference import one_thread
from tools.checkpoints.measure import failed_checks, measure_answers


@pytest.mark.nightly
def test_the_promised_figures(tiny_checkpoint):
    """What the command line checks after writing: texts in both voices, and audio, images, video."""
    with one_thread():
        answers = measure_answers(tiny_checkpoint)
    assert failed_checks(answers) == []
    # float32 rounding moves a logit by up to 6e-5; a gap of that size could flip a token between two implementations.
    assert min(min(answer.thinker_gap, answer.codec_gap) for answer in answers) > 2e-4
