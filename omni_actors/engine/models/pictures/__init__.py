"""What the families of picture models share: denoising, the stages around it, and here the pictures of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import LAYERED_FILE, Item, MediaLimits
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import PICTURE
from omni_actors.protocol.payloads import Media, MediaEncoding, Parameter, Prompt

Given = tuple[Media, HostTensor, str]  # a picture of a prompt, and what to call it
STATES, NEGATIVE_STATES = "states", "negative_states"  # names of the prompts' hidden states [tokens, text_width]
NEGATIVE_TOKENS = "negative_token_ids"  # name of the negative prompt's token ids, i64 [tokens]
MAX_REFERENCES = 10  # pictures that a prompt refers to
ADAPTER = Parameter("adapter", "text", most=128, about="LoRA adapter, by its name in the pipeline's YAML")
PREVIEWS = Parameter("previews", "int", 0, 16, 0, about="pictures to show of the way to the final one")


def picture(index: int) -> str:
    """The name of a reference's pixels, u8 [height, width, channels], from the prompt stage to the VAE encoder."""
    return f"{PICTURE}{index}"


def reference(index: int) -> str:
    """The name of its latents, f32 [channels, height, width], from there to the denoising stage."""
    return f"reference_{index}"


def negative_ids(tensors: Mapping[str, HostTensor]) -> list[int] | None:
    """The token ids of the negative prompt, if there is one. Raises `InvalidPayload` for anything else."""
    given = tensors.get(NEGATIVE_TOKENS)
    if given is None:
        return None
    given.validate(NEGATIVE_TOKENS)
    if given.dtype is not DType.I64 or len(given.shape) != 1:
        raise InvalidPayload(f"{NEGATIVE_TOKENS} needs i64 [tokens].")
    token_ids: list[int] = np.frombuffer(given.data, dtype=np.int64).tolist()
    return token_ids


def text_of(prompt: Prompt) -> str:
    """The text of a prompt, which is that of one message of the user.

    Raises:
        InvalidRequest: it is a conversation, token ids or embeddings.
    """
    if prompt.length:
        raise InvalidRequest(
            "This model takes its prompt as text.", hint="Send a text instead of tokens or embeddings."
        )
    if prompt.uses_tools:
        raise InvalidRequest("This model calls no tools.", field="tools")
    if [message.role for message in prompt.messages] != ["user"]:
        raise InvalidRequest(
            "The prompt of a picture is one message of the user.",
            hint="Say all of it in one message.",
            field="messages",
        )
    return "\n".join(part.text for part in prompt.messages[0].content if part.text is not None)


def layered_pictures(given: Sequence[Given], decoder: MediaDecoder, limits: MediaLimits) -> list[Image.Image]:
    """Return the pictures of a prompt with an alpha channel; files are decoded. Raises `OmniError`."""
    files = [(Item(LAYERED_FILE, name, _size(tensor)), tensor.data) for media, tensor, name in given if _is_file(media)]
    used = sum(_size(tensor) for media, tensor, _ in given if not _is_file(media))
    decoded = iter(decoder.decode(files, limits, used) if files else ())
    return [Image.fromarray(next(decoded), "RGBA") if _is_file(media) else _array(tensor) for media, tensor, _ in given]


def on_white(image: Image.Image) -> Image.Image:
    """Return an opaque picture, as most models see them."""
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _size(tensor: HostTensor) -> int:
    return memoryview(tensor.data).nbytes


def _is_file(media: Media) -> bool:
    return media.encoding is MediaEncoding.FILE


def _array(tensor: HostTensor) -> Image.Image:
    """A picture u8 [height, width, 3], which is opaque."""
    if tensor.dtype is not DType.U8 or len(tensor.shape) != 3 or tensor.shape[2] != 3:
        raise InvalidRequest(f"A picture needs u8 [height, width, 3]; got {tensor.dtype} {list(tensor.shape)}.")
    pixels = np.frombuffer(tensor.data, dtype=np.uint8).reshape(tensor.shape)
    return Image.fromarray(pixels, "RGB").convert("RGBA")
