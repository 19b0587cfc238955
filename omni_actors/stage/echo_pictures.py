"""Pictures of an echo stage: noise that becomes a pattern of its input, one step at a time.

A stage with `image` among its outputs draws a picture from tokens, or decodes the latents of a stage before it; one
with the option `latents` makes those. Latents are f32 [4, height / 8, width / 8], of colours and opacity from -1 to 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import msgspec
import numpy
from numpy.typing import NDArray

from omni_actors.config import check_parameters
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.payloads import Parameter
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import EngineEvent, ImageEvent, LatentsEvent, ProgressEvent, StageRequest

SCALE = 8  # pixels of a latent's side
CHANNELS = 4
SIZE, STEPS = 64, 4  # by default
TRANSPARENT = "transparent"
PARAMETERS = (
    Parameter("width", "int", least=SCALE, most=4096, multiple_of=SCALE, default=SIZE, about="pixels"),
    Parameter("height", "int", least=SCALE, most=4096, multiple_of=SCALE, default=SIZE, about="pixels"),
    Parameter("num_steps", "int", least=1, most=1000, default=STEPS, about="steps from noise to the picture"),
    Parameter("guidance_scale", "float", least=0, most=100, default=1.0, about="changes the colours"),
    Parameter("negative_prompt", "text", most=4096, about="changes the colours"),
    Parameter("previews", "int", least=0, most=16, default=0, about="pictures of the way there"),
    Parameter("background", "text", choices=("auto", "opaque", TRANSPARENT), default="auto", about="of the picture"),
)

Latents = NDArray[numpy.float32]


class Drawing:
    """One request for a picture.

    Args:
        media: reference pictures, which change the colours.
        outputs: what to make of the latents: `image`, `latents` or both.

    Raises:
        InvalidRequest: a parameter is not what an echo stage takes.
    """

    def __init__(
        self,
        stage: str,
        request: StageRequest,
        tokens: Sequence[int],
        media: Sequence[HostTensor],
        outputs: Collection[str],
    ) -> None:
        params = request.params
        check_parameters(stage, PARAMETERS, params)
        self._request_id = request.request_id
        self._outputs = outputs
        self._steps = params.num_steps or STEPS
        self._step = 0
        self._preview_steps = preview_steps(self._steps, params.previews or 0)
        self._opaque = (params.extra_args or {}).get("background") != TRANSPARENT
        shape = (CHANNELS, (params.height or SIZE) // SCALE, (params.width or SIZE) // SCALE)
        self.size = shape[1] * shape[2]
        about = (params.guidance_scale, params.negative_prompt, request.effective_seed)
        source = zlib.crc32(pack_token_ids(tokens), zlib.crc32(msgspec.json.encode(about)))
        for picture in media:
            source = zlib.crc32(picture.data, source)
        generator = numpy.random.default_rng(source)
        self._noise = generator.uniform(-1, 1, shape).astype(numpy.float32)
        self._pattern = _pattern(generator, shape)

    @property
    def done(self) -> bool:
        """Whether the picture is complete."""
        return self._step == self._steps

    def advance(self) -> list[EngineEvent]:
        """Do the next step."""
        self._step += 1
        events: list[EngineEvent] = [ProgressEvent(self._request_id, self._step, self._steps)]
        if self.done or self._step in self._preview_steps:
            part = numpy.float32(self._step / self._steps)
            latents = part * self._pattern + (1 - part) * self._noise
            if self._opaque:
                latents[3] = 1
            tensor = HostTensor(DType.F32, latents.shape, latents.tobytes())
            preview = not self.done
            if "image" in self._outputs:
                events.append(ImageEvent(self._request_id, decoded(tensor), preview))
            if "latents" in self._outputs:
                events.append(LatentsEvent(self._request_id, tensor, preview))
        return events


def _pattern(generator: numpy.random.Generator, shape: tuple[int, int, int]) -> Latents:
    """Colours that change from each corner to the others."""
    _, height, width = shape
    corners = generator.uniform(-1, 1, (CHANNELS, 2, 2)).astype(numpy.float32)
    down = numpy.linspace(0, 1, height, dtype=numpy.float32)[:, None]
    across = numpy.linspace(0, 1, width, dtype=numpy.float32)
    left = corners[:, 0, 0, None, None] * (1 - down) + corners[:, 1, 0, None, None] * down
    right = corners[:, 0, 1, None, None] * (1 - down) + corners[:, 1, 1, None, None] * down
    return (left * (1 - across) + right * across).astype(numpy.float32)


def decoded(tensor: HostTensor) -> HostTensor:
    """Return the picture of latents: RGB, or RGBA if some of it is not opaque. Raises `InvalidPayload`."""
    if tensor.dtype is not DType.F32 or len(tensor.shape) != 3 or tensor.shape[0] != CHANNELS:
        raise InvalidPayload(f"An echo stage decodes f32 [{CHANNELS}, height, width]; got {list(tensor.shape)}.")
    latents: Latents = numpy.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    colours = numpy.clip((latents + 1) * 127.5, 0, 255).round().astype(numpy.uint8)
    channels = CHANNELS if colours[3].min() < 255 else CHANNELS - 1
    pixels = colours[:channels].repeat(SCALE, 1).repeat(SCALE, 2).transpose(1, 2, 0)
    return HostTensor(DType.U8, pixels.shape, pixels.tobytes())


def preview_steps(steps: int, previews: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which a picture of `steps` steps is shown `previews` times.

    They are spread evenly. The last step is not among them, so there may be fewer than asked for.
    """
    places = (round(number * steps / (previews + 1)) for number in range(1, previews + 1))
    return frozenset(place for place in places if 0 < place < steps)
