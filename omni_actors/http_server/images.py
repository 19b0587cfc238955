"""The routes /v1/images/generations and /v1/images/edits: pictures from a text, or from a text and pictures."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Image, Progress
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import EVENTS, Answer, AnswerResponse, event
from omni_actors.http_server.bodies import (
    ABSENT,
    OF_EDITS,
    OF_NEW_IMAGES,
    Form,
    FormBody,
    FormFile,
    JsonBody,
    ParamsByStage,
    Submission,
    base64_string,
    decoded_params,
)
from omni_actors.http_server.errors import HttpError, bad_field, fields_at_fault
from omni_actors.http_server.generation import answers_of
from omni_actors.http_server.state import ServerState, json_response, keep_picture
from omni_actors.protocol.messages import Description, StageUsage
from omni_actors.protocol.payloads import Parameter, StageParams

ImageFormat = Literal["png", "jpeg", "webp"]
Background = Literal["transparent", "opaque"]
QUALITY = 95  # of jpeg and webp; more takes many more bytes and can hardly be seen
WHITE = 255


def background_of(pixels: NDArray[numpy.uint8]) -> Background:
    """Whether some of a picture can be seen through."""
    return "transparent" if pixels.shape[2] == 4 and pixels[:, :, 3].min() < WHITE else "opaque"


def encoded_image(pixels: NDArray[numpy.uint8], name: ImageFormat, quality: int | None = None) -> bytes:
    """Encode a picture, u8 [height, width, 3 or 4].

    Args:
        quality: of jpeg and webp, from 0 to 100.
    """
    import cv2  # takes a tenth of a second to import, as Pillow does, and writes a PNG in half of its time

    quality = QUALITY if quality is None else quality
    options = {
        # Photographs repeat little: without the search for it the file is no larger.
        "png": (
            cv2.IMWRITE_PNG_STRATEGY,
            cv2.IMWRITE_PNG_STRATEGY_RLE,
            cv2.IMWRITE_PNG_FILTER,
            cv2.IMWRITE_PNG_FILTER_SUB,
        ),
        "jpeg": (cv2.IMWRITE_JPEG_QUALITY, quality),
        "webp": (cv2.IMWRITE_WEBP_QUALITY, max(quality, 1)),
    }
    shown = flattened(pixels) if name == "jpeg" else pixels
    order = cv2.COLOR_RGB2BGR if shown.shape[2] == 3 else cv2.COLOR_RGBA2BGRA
    return cv2.imencode(f".{name}", cv2.cvtColor(shown, order), options[name])[1].tobytes()


def flattened(pixels: NDArray[numpy.uint8]) -> NDArray[numpy.uint8]:
    """Put a picture with an alpha channel on white."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[:, :, 3:].astype(numpy.uint16)
    mixed: NDArray[numpy.uint8] = ((pixels[:, :, :3] * alpha + WHITE * (WHITE - alpha) + 127) // WHITE).astype("u1")
    return mixed


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
    "seconds": "seconds",
    "previews": "partial_images",
    "background": "background",
    "mask": "mask",
    "adapter": "model",
}


NO_CHANGE = (("background", "auto"), ("previews", 0))


class DrawingFields(Submission, frozen=True, kw_only=True):
    """The fields of pictures and videos: first OpenAI's, then those of diffusion models."""

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT)]
    size: Annotated[str, Meta(max_length=16, extra_json_schema={"pattern": SIZE.pattern})] | None = None

    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] | None = None

    def check(self) -> None:
        """Raise `HttpError` 400 for a field with an unsupported value."""
        if self.size is not None and not SIZE.match(self.size):
            raise bad_field("size", "size must be WIDTHxHEIGHT in pixels, such as 1024x1024, or auto.")


class ImageFields(DrawingFields, frozen=True, kw_only=True):
    """The fields of both routes but pictures: first OpenAI's, then those of this server."""

    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)] | None = None
    progress: bool | None = None

    def check(self) -> None:
        """Raise `HttpError` 400 for a field with an unsupported value, or fields that do not go together."""
        super().check()
        if self.stream and (self.n or 1) > 1:
            raise bad_field("n", "n must be 1 with stream: the events do not say which picture they belong to.")
        if self.stream and self.response_format == "url":
            raise bad_field("response_format", "response_format must be b64_json with stream.")
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise bad_field(name, f"{name} needs stream: true.")
        if self.output_compression not in (None, 100) and self.output_format in (None, "png"):
            raise bad_field("output_compression", "output_compression needs an output_format of jpeg or webp.")
        if self.background == TRANSPARENT and self.output_format == "jpeg":
            raise bad_field("background", "A transparent background needs an output_format of png or webp.")


class ImageRequest(ImageFields, frozen=True, kw_only=True):
    """Body of POST /v1/images/generations."""

    stage_params: ParamsByStage = ABSENT


def parameters_of(fields: DrawingFields) -> dict[str, Any]:
    """The parameters of the pipeline that the fields set, by name."""
    given = {name: getattr(fields, field, None) for name, field in FIELD_OF.items() if name != "adapter"}
    width, _, height = (fields.size or "auto").partition("x")
    given |= {"width": int(width) if height else None, "height": int(height) if height else None}
    # `auto` and no previews are what a model does anyway.
    return {name: value for name, value in given.items() if (name, value) not in NO_CHANGE and value is not None}


def params_of(fields: DrawingFields, description: Description, mask: bool = False) -> dict[str, StageParams]:
    """The parameters of a request by stage: each field goes to all stages whose model declares its parameter.

    So does the LoRA adapter that the request's model may be.

    Args:
        mask: one of its pictures is a mask.

    Raises:
        HttpError: no stage does, or `stage_params` are wrong.
    """
    params: dict[str, dict[str, Any]] = {}
    declared = description.parameters
    given = parameters_of(fields)
    if mask:
        given["mask"] = True
    if fields.model in description.adapters:
        given["adapter"] = fields.model
    for name, value in given.items():
        stages = [stage for stage, those in declared.items() if any(one.name == name for one in those)]
        if not stages and not (name == "background" and value != TRANSPARENT):  # pictures are opaque anyway
            raise _not_declared(name, declared)
        for stage in stages:
            own = params.setdefault(stage, {})
            (own if name in StageParams.__struct_fields__ else own.setdefault("extra_args", {}))[name] = value
    found = {stage: StageParams(**own) for stage, own in params.items()}
    by_stage = decoded_params(fields.stage_params) if isinstance(fields, ImageRequest) else {}
    for stage, own_params in by_stage.items():
        found[stage] = own_params.merged_over(found.get(stage, StageParams()))
    return found


def _not_declared(name: str, declared: Mapping[str, Sequence[Parameter]]) -> HttpError:
    known = {one.name for those in declared.values() for one in those}
    listed = ", ".join(dict.fromkeys(field for parameter, field in FIELD_OF.items() if parameter in known))
    field = FIELD_OF[name]
    return bad_field(
        field, f"This model takes no {field}; it takes {listed or 'a prompt alone'}.", "unsupported_parameter"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Answers

GENERATION = JsonBody(ImageRequest, OF_NEW_IMAGES)
MAX_REFERENCES = 16
MODALITY, MASK = "image", "mask"
EDIT = FormBody(ImageFields, OF_EDITS, {"image": MAX_REFERENCES, MASK: 1}, "image")
TOKEN_PIXELS = 16  # of a token's side, as the models here have it
FIELDS = fields_at_fault("prompt", "image", **FIELD_OF)


async def generations(request: Request, state: ServerState, body: ImageRequest) -> Response:
    """Make pictures of a text."""
    return await _respond(body, (), "image_generation", request, state)


async def edits(request: Request, state: ServerState, form: Form[ImageFields]) -> Response:
    """Make pictures of a text and of other pictures; a mask says which part of them changes."""
    return await _respond(form.fields, form.files, "image_edit", request, state)


async def _respond(
    fields: ImageFields, files: Sequence[FormFile], kind: str, request: Request, state: ServerState
) -> Response:
    description, prompt, params = await drawing(fields, files, MODALITY, state)
    n = answers_of(fields.n, description.max_in_flight)
    answer = await Answer.begin(request, state, fields, prompt, FIELDS, n=n, modalities=[MODALITY], params=params)
    keep = partial(keep_picture, request, state) if fields.response_format == "url" else None
    pictures = Pictures(fields, kind, answer, description, keep)
    if fields.stream:
        return AnswerResponse(answer, pictures.events(), EVENTS, state.settings.write_timeout)
    async with answer:
        return json_response(await pictures.whole())


async def drawing(
    fields: DrawingFields, files: Sequence[FormFile], modality: str, state: ServerState
) -> tuple[Description, Any, dict[str, StageParams]]:
    """The pipeline, and what a request for pictures or videos asks of it: the prompt, and parameters by stage.

    Args:
        files: pictures that go with the text.

    Raises:
        HttpError: the model makes none, or does not take a field or a file.
    """
    fields.check()
    description = await state.facts()
    state.model_name(fields.model, description)
    if modality not in description.modalities:
        made = "pictures" if modality == MODALITY else f"{modality}s"
        message = f"This model makes no {made}; it answers in {', '.join(description.modalities)}."
        raise bad_field("model", message, "unknown_modality")
    params = params_of(fields, description, mask=any(file.field == MASK for file in files))
    if not files:
        return description, fields.prompt, params
    parts = await state.media.pictures(files, description.max_media)
    return description, [{"role": "user", "content": [*parts, {"type": "text", "text": fields.prompt}]}], params


@dataclass(frozen=True)
class Pictures:
    """Converts an answer to OpenAI's objects.

    Args:
        kind: how the types of the events begin.
        keep: keeps a file of a format and returns its URL, if the client wants that.
    """

    fields: ImageFields
    kind: str
    answer: Answer
    description: Description
    keep: Callable[[bytes, str], Awaitable[str]] | None

    @property
    def _format(self) -> ImageFormat:
        return self.fields.output_format or "png"

    async def whole(self) -> dict[str, Any]:
        """All pictures as an ImagesResponse."""
        found: dict[int, NDArray[numpy.uint8]] = {}
        async for index, item in self.answer.choices():
            if isinstance(item, Image) and not item.preview:
                found[index] = item.pixels
        if len(found) < len(self.answer.usages):
            raise _no_picture()
        pictures = [found[index] for index in sorted(found)]
        return {
            "created": int(time.time()),
            "data": await asyncio.gather(*map(self._shown, pictures)),
            **self._about(pictures[0]),
            "usage": image_usage(self.answer.usages[0], pictures, self.description),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Stream previews and the picture, and progress if it is asked for."""
        previews = 0
        last: dict[str, Any] | None = None
        async for item in self.answer:
            if isinstance(item, Progress) and self.fields.progress:
                yield self._event("progress", step=item.step, steps=item.steps, stage=item.stage)
            elif isinstance(item, Image):
                picture = {**await self._shown(item.pixels), **self._about(item.pixels)}
                picture["created_at"] = int(time.time())
                if item.preview:
                    yield self._event("partial_image", **picture, partial_image_index=previews)
                    previews += 1
                else:
                    last, pixels = picture, item.pixels
        if last is None:
            raise _no_picture()
        usage = image_usage(self.answer.usages[0], [pixels], self.description)
        yield self._event("completed", **last, usage=usage)

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": f"{self.kind}.{name}", **fields})

    def _about(self, pixels: NDArray[numpy.uint8]) -> dict[str, Any]:
        height, width, _ = pixels.shape
        opaque = self.fields.background == "opaque" or self._format == "jpeg"
        background = "opaque" if opaque else background_of(pixels)
        return {"size": f"{width}x{height}", "output_format": self._format, "background": background, "quality": "auto"}

    async def _shown(self, pixels: NDArray[numpy.uint8]) -> dict[str, Any]:
        """The picture as a file: its base64, or a URL."""
        if self.keep is None:
            return {"b64_json": await asyncio.to_thread(lambda: base64_string(self._file(pixels)))}
        return {"url": await self.keep(await asyncio.to_thread(self._file, pixels), self._format)}

    def _file(self, pixels: NDArray[numpy.uint8]) -> bytes:
        given = flattened(pixels) if self.fields.background == "opaque" else pixels
        return encoded_image(given, self._format, self.fields.output_compression)


def image_usage(
    usage: Mapping[str, StageUsage], pictures: Sequence[NDArray[numpy.uint8]], description: Description
) -> dict[str, Any]:
    """OpenAI's usage: what the first stage that counts tokens read, once for all; a token for 16 x 16 pixels made."""
    entries = (usage.get(stage.stage) for stage in description.stages)
    entry = next((entry for entry in entries if entry is not None and entry.input_tokens), None)
    read, shown = (entry.input_tokens, entry.picture_tokens) if entry is not None else (0, 0)
    made = sum(math.ceil(one.shape[0] / TOKEN_PIXELS) * math.ceil(one.shape[1] / TOKEN_PIXELS) for one in pictures)
    return {
        "input_tokens": read,
        "input_tokens_details": {"text_tokens": read - shown, "image_tokens": shown},
        "output_tokens": made,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": made},
        "total_tokens": read + made,
    }


def _no_picture() -> HttpError:
    message = "The model ended without a picture."
    return HttpError(500, message, code=ErrorCode.ENGINE_ERROR.value)
