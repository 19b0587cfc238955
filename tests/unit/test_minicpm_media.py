"""MiniCPM-o's encoders: checkpoints of another kind, and features that contradict one another."""

from __future__ import annotations

import pytest
from PIL import Image

from omni_actors.engine.models.minicpm_o.config import QUERIES, MiniCpmOConfig, hearing_part, seeing_part
from omni_actors.engine.models.minicpm_o.pictures import PIXELS, SIZES, patches_of, slices_of
from omni_actors.engine.models.minicpm_o.prompt import media_embeddings
from omni_actors.errors import ConfigError


@pytest.mark.parametrize(
    ("part", "given", "name"),
    [
        (hearing_part, {"audio_pool_step": 2, "audio_config": {}}, "audio_pool_step"),
        (seeing_part, {"query_num": 96, "vision_config": {}}, "query_num"),
        (seeing_part, {"vision_config": {"patch_size": 16}}, "vision_config.patch_size"),
    ],
)
def test_encoders_of_another_kind_are_refused_by_name(part, given, name):
    with pytest.raises(ConfigError, match=f"{name} of the checkpoint"):
        part(MiniCpmOConfig(**given))


def test_features_of_a_picture_have_as_many_patches_as_their_slices():
    patches, sizes = patches_of(slices_of(Image.new("RGB", (1000, 700))))
    assert media_embeddings("image", {PIXELS: patches, SIZES: sizes}) == 5 * QUERIES
    for wrong in (
        {PIXELS: patches[1:], SIZES: sizes},
        {PIXELS: patches[..., 1:], SIZES: sizes},
        {PIXELS: patches, SIZES: -sizes},
        {PIXELS: patches, SIZES: sizes[:, :1]},
    ):
        assert media_embeddings("image", wrong) == -1
