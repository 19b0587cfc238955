"""Bodies of the routes for pictures, as OpenAI defines them, with fields of diffusion models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fields import ABSENT, ParamsByStage, Submission, decoded_params
from omni_actors.http_server.image_formats import ImageFormat
from omni_actors.protocol.payloads import Parameter, StageParams

MAX_PICTURES = 10
MAX_PREVIEWS = 3
MAX_PROMPT = 32_000  # characters, OpenAI's limits
TRANSPARENT = "transparent"
SIZE = re.compile(r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")

# The field of a request, by the name of the parameter that it sets in the stages that declare it.
FIELD_OF = {
    "width": "size",
    "height": "size",
    "num_steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
    "negative_prompt": "negative_prompt",
    "previews": "partial_images",
    "background": "background",
}


class ImageFields(Submission, frozen=True, kw_only=True):
    """The fields of both routes: first OpenAI's, then those of diffusion models and of this server."""

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT)]
    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] | None = None
    size: Annotated[str, Meta(max_length=16, extra_json_schema={"pattern": SIZE.pattern})] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)] | None = None

    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] | None = None
    progress: bool | None = None

    def check(self) -> None:
        """Raise `HttpError` 400 for a field with an unsupported value, or fields that do not go together."""
        if self.size is not None and not SIZE.match(self.size):
            raise bad_field("size", "size must be WIDTHxHEIGHT in pixels, such as 1024x1024, or auto.")
        if self.stream and (self.n or 1) > 1:
            raise bad_field("n", "n must be 1 with stream: the events do not say which picture they belong to.")
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise bad_field(name, f"{name} needs stream: true.")
        if self.output_compression not in (None, 100) and self.output_format in (None, "png"):
            raise bad_field("output_compression", "output_compression needs an output_format of jpeg or webp.")
        if self.background == TRANSPARENT and self.output_format == "jpeg":
            raise bad_field("background", "A transparent background needs an output_format of png or webp.")

    def parameters(self) -> dict[str, Any]:
        """The parameters of the pipeline that the fields set, by name."""
        width, _, height = (self.size or "auto").partition("x")
        given = {
            "width": int(width) if height else None,
            "height": int(height) if height else None,
            "num_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "negative_prompt": self.negative_prompt,
            "previews": self.partial_images or None,
            "background": self.background if self.background != "auto" else None,
        }
        return {name: value for name, value in given.items() if value is not None}


class ImageRequest(ImageFields, frozen=True, kw_only=True):
    """Body of POST /v1/images/generations."""

    stage_params: ParamsByStage = ABSENT


class EditForm(ImageFields, frozen=True, kw_only=True):
    """The fields of POST /v1/images/edits besides the pictures."""


def params_of(fields: ImageFields, declared: Mapping[str, Sequence[Parameter]]) -> dict[str, StageParams]:
    """The parameters of a request by stage: each field goes to all stages whose model declares its parameter.

    Raises:
        HttpError: no stage does, or `stage_params` are wrong.
    """
    params: dict[str, dict[str, Any]] = {}
    for name, value in fields.parameters().items():
        stages = [stage for stage, those in declared.items() if any(one.name == name for one in those)]
        if not stages and not (name == "background" and value != TRANSPARENT):  # pictures are opaque anyway
            raise _not_declared(name, declared)
        for stage in stages:
            own = params.setdefault(stage, {})
            if name in StageParams.__struct_fields__:
                own[name] = value
            else:
                own.setdefault("extra_args", {})[name] = value
    found = {stage: StageParams(**own) for stage, own in params.items()}
    by_stage = decoded_params(fields.stage_params) if isinstance(fields, ImageRequest) else {}
    for stage, given in by_stage.items():
        found[stage] = given.merged_over(found.get(stage, StageParams()))
    return found


def _not_declared(name: str, declared: Mapping[str, Sequence[Parameter]]) -> HttpError:
    known = {one.name for those in declared.values() for one in those}
    listed = ", ".join(dict.fromkeys(field for parameter, field in FIELD_OF.items() if parameter in known))
    field = FIELD_OF[name]
    return bad_field(
        field, f"This model takes no {field}; it takes {listed or 'a prompt alone'}.", "unsupported_parameter"
    )
