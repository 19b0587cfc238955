"""Contents of a request: prompt, media, tools, parameters of the stages and additional information."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import (
    FLOATING,
    TOKEN_BYTES,
    HostTensor,
    Name,
    Scalar,
    Seed,
    TensorRef,
    TokenId,
    check_form,
    check_token_ids,
)

TOOLS = "tools"  # name of a request's tools among the lists that the prompt stage sends
MAX_TOOLS = 128
MAX_CALLS = 128  # in one message

CallId = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(max_length=256)]
Json = Annotated[str, Meta(max_length=1 << 20)]


class Tools(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tools of a request.

    Args:
        definitions: of each function the JSON of `{"name": ..., "description": ..., "parameters": SCHEMA}`.
        choice: whether the model may call them, must call one, or must not.
        name: the only function that it may call.
        parallel: whether one answer may call several.
    """

    definitions: Annotated[tuple[Json, ...], Meta(min_length=1, max_length=MAX_TOOLS)]
    choice: Literal["auto", "none", "required"] = "auto"
    name: ToolName | None = None
    parallel: bool = True

    def packed(self) -> list[Scalar]:
        """Return these tools as a list that a stage can send to another one, under the name `TOOLS`."""
        return [msgspec.json.encode(self).decode()]

    @classmethod
    def unpacked(cls, values: Sequence[Scalar]) -> Tools:
        """Reverse `packed`. Raises `InvalidPayload`."""
        try:
            return msgspec.json.decode(str(values[0]), type=cls)
        except (msgspec.MsgspecError, IndexError) as error:
            raise InvalidPayload(f"The tools of the request cannot be read: {error}.") from error


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of an earlier answer. `arguments` is the JSON of an object."""

    id: CallId
    name: ToolName
    arguments: Json


class ToolCallPiece(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The next piece of a call: first its id and name, then its arguments bit by bit. `index` numbers the calls."""

    index: Annotated[int, Meta(ge=0, le=1023)]
    id: CallId = ""
    name: ToolName = ""
    arguments: Json = ""


class CollectedCalls:
    """Puts the pieces of calls together."""

    def __init__(self) -> None:
        self._calls: dict[int, list[ToolCallPiece]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, pieces: Sequence[ToolCallPiece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            self._calls.setdefault(piece.index, []).append(piece)

    def whole(self) -> list[ToolCall]:
        """The calls so far, in order."""
        fields = ToolCall.__struct_fields__  # those of pieces, too
        return [
            ToolCall(*("".join(getattr(piece, field) for piece in pieces) for field in fields))
            for _, pieces in sorted(self._calls.items())
        ]


def function_of(definition: str) -> dict[str, Any]:
    """The function that a definition describes. Raises `InvalidRequest` if it is not the JSON of an object."""
    try:
        function = msgspec.json.decode(definition)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"tools: a definition is not valid JSON: {error}.", field=TOOLS) from error
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("tools: a definition must be an object with a name.", field=TOOLS)
    return function


PROMPT_EMBEDS = "prompt_embeds"  # name of a prompt's embeddings among an engine's tensors
ADDITIONAL_INFORMATION = "additional_information"  # the client's name for named values that go with a request
NUMBER_BYTES = 8

InformationValue = Scalar | Sequence[Scalar] | HostTensor


class AdditionalInformationEntry(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One named value: exactly one of a tensor, a list of scalars and a scalar (a string of at most 65536)."""

    tensor: TensorRef | None = None
    list: Annotated[tuple[Scalar, ...], Meta(max_length=65536)] | None = None
    scalar: Scalar | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("tensor", "list", "scalar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidPayload(
                f"Additional information must hold exactly one of tensor, list and scalar; got {given or 'none'}."
            )
        if isinstance(self.scalar, str) and len(self.scalar) > 65536:
            raise InvalidPayload(f"A scalar string may have 65536 characters; got {len(self.scalar)}.")


class AdditionalInformationPayload(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Named values that travel with a stage's input, at most 64."""

    entries: Annotated[dict[Name, AdditionalInformationEntry], Meta(max_length=64)] = {}

    @classmethod
    def of(
        cls, values: Mapping[str, InformationValue], add: Callable[[HostTensor], TensorRef]
    ) -> AdditionalInformationPayload:
        """Make the payload of named values; `add` makes a tensor's data a buffer of the message."""
        entries = {}
        for name, value in values.items():
            if isinstance(value, HostTensor):
                entries[name] = AdditionalInformationEntry(tensor=add(value))
            elif isinstance(value, Scalar):
                entries[name] = AdditionalInformationEntry(scalar=value)
            else:
                entries[name] = AdditionalInformationEntry(list=tuple(value))
        return cls(entries) if entries else NO_INFORMATION

    def values(self, tensor: Callable[[TensorRef], HostTensor]) -> dict[str, InformationValue]:
        """Return the values by name: scalars, lists and tensors. `tensor` finds a tensor's data in the message."""
        values: dict[str, InformationValue] = {}
        for name, entry in self.entries.items():
            if entry.tensor is not None:
                values[name] = tensor(entry.tensor)
            elif entry.list is not None:
                values[name] = list(entry.list)
            elif entry.scalar is not None:
                values[name] = entry.scalar
        return values

    @property
    def size(self) -> int:
        """Bytes of the scalars and lists, roughly; those of tensors are in the buffers."""
        values = [
            value for entry in self.entries.values() for value in (entry.list or (entry.scalar,)) if value is not None
        ]
        return sum(len(value) if isinstance(value, str) else NUMBER_BYTES for value in values)

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return tuple(entry.tensor for entry in self.entries.values() if entry.tensor is not None)


NO_INFORMATION = AdditionalInformationPayload()


class PromptEmbedsPayload(Struct, frozen=True, forbid_unknown_fields=True):
    """Embeddings that stand in for prompt tokens: a floating-point tensor [positions >= 1, width >= 1]."""

    tensor: TensorRef

    def __post_init__(self) -> None:
        fits = len(self.tensor.shape) == 2 and 0 not in self.tensor.shape and self.tensor.dtype in FLOATING
        check_form(fits, self.tensor, "Prompt embeddings must be floating-point numbers of shape [positions, width]")


LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)]
AllowedTokens = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1024)]
StopTokens = Annotated[tuple[TokenId, ...], Meta(max_length=256)]
Word = Annotated[str, Meta(min_length=1, max_length=1024)]
Words = Annotated[tuple[Word, ...], Meta(max_length=64)]
Pixels = Annotated[int, Meta(ge=1, le=65_536)]
ExtraArg = (
    Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[float, Meta(ge=-1e308, le=1e308)]
    | Annotated[str, Meta(max_length=65_536)]
    | bool
)
ExtraArgs = Annotated[dict[Name, ExtraArg], Meta(max_length=64)]


class StructuredOutputs(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A form that the text must have: exactly one of the first six.

    Args:
        json: JSON schema, as text.
        json_object: any JSON object.
        regex: regular expression.
        choice: the texts to choose the answer from.
        grammar: context-free grammar in EBNF or Lark.
        structural_tag: JSON of free text with tags between which schemas hold.
        disable_any_whitespace: no spaces or newlines between the parts of JSON.
        disable_additional_properties: no properties that a schema does not name.
        whitespace_pattern: regular expression of the space between the parts of JSON.
    """

    json: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(max_length=8192)] | None = None
    choice: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    structural_tag: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Annotated[str, Meta(max_length=1024)] | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(STRUCTURES)} must be given; got {given or 'none'}")
        if self.json_object is False:
            raise ValueError("json_object is true or left out")

    @property
    def form(self) -> str:
        """The name of the field that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)


STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StageParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one stage for one request; `None` means the stage's default from the YAML.

    The first group belongs to autoregressive stages, the second to diffusion stages, `seed` to both; the third to
    those whose model declares them, with limits of its own (`Parameter`).

    Args:
        max_tokens: largest number of tokens to generate. With 0 a stage with text only computes the prompt, so that a
            later one that begins with it is answered sooner; then no stage may follow.
        min_tokens: number of tokens before which generation cannot end.
        temperature: 0 always takes the likeliest token; higher values vary more.
        top_p: sample from the likeliest tokens that together have this probability.
        top_k: sample from this many of the likeliest tokens; 0 or -1 for all.
        min_p: ignore tokens less likely than this fraction of the likeliest one's probability.
        repetition_penalty: above 1, tokens that have occurred become less likely.
        frequency_penalty: above 0, tokens become less likely with each time they have been generated.
        presence_penalty: above 0, tokens that have been generated become less likely.
        logit_bias: what is added to the scores of tokens, by token id; -100 all but forbids a token.
        allowed_token_ids: the only tokens that may be generated.
        bad_words: texts that are not generated; only for stages with text, as are the next four.
        stop: texts that end generation; the answer ends before the first of them.
        include_stop_str_in_output: have the answer end after the text or the token that stopped it.
        skip_special_tokens: leave special tokens out of the text; true by default.
        spaces_between_special_tokens: separate special tokens that stay in the text; true by default.
        structured_outputs: form that the text must have, such as a JSON schema; only for stages with text.
        logprobs: how many of the likeliest tokens to report at each position, with the logarithms of their
            probabilities and that of the token taken; only for stages with text.
        prompt_logprobs: the same for each position of the prompt but the first; the prompt is computed without the
            prefix cache, and may not ask for more than 32,768 probabilities.
        stop_token_ids: tokens that end generation, in addition to the model's own; not part of the text.
        ignore_eos: continue past the model's own end tokens.
        adapter: LoRA adapter for the model, by its name in the pipeline's `adapters`; for stages with text, those of
            diffusers, and those that denoise pictures if their model takes any.
        seed: makes sampling repeatable; default: the request's seed.
        num_steps: denoising steps.
        guidance_scale: how strongly the model follows its conditions; 0 for no guidance.
        sway_coefficient: how far the steps are shifted towards the start of the denoising.
        width: of a picture, in pixels.
        height: of a picture, in pixels.
        negative_prompt: what a picture should not show.
        previews: how many pictures to show of the way to the final one.
        extra_args: parameters of the model's own, by name.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: Words | None = None
    stop: Words | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    adapter: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    seed: Seed | None = None

    num_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    sway_coefficient: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None

    width: Pixels | None = None
    height: Pixels | None = None
    negative_prompt: Annotated[str, Meta(max_length=65_536)] | None = None
    previews: Annotated[int, Meta(ge=0, le=16)] | None = None
    extra_args: ExtraArgs | None = None

    def merged_over(self, defaults: StageParams) -> StageParams:
        """Return these values, with `defaults` where they are `None`."""
        given = self.given()
        if self.extra_args is not None and defaults.extra_args is not None:
            given["extra_args"] = {**defaults.extra_args, **self.extra_args}
        return msgspec.structs.replace(defaults, **given)

    def given(self) -> dict[str, Any]:
        """Return the fields that are not `None`."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


_DIFFUSION_ONLY = frozenset({"num_steps", "guidance_scale", "sway_coefficient"})
# Those that a stage has only if its model declares them.
DECLARED_PARAMS = frozenset({"width", "height", "negative_prompt", "previews", "extra_args"})
PROMPT_PARAMS = frozenset({"negative_prompt", "extra_args"})
DIFFUSION_PARAMS = _DIFFUSION_ONLY | DECLARED_PARAMS | {"seed"}
AUTOREGRESSIVE_PARAMS = frozenset(StageParams.__struct_fields__) - _DIFFUSION_ONLY - DECLARED_PARAMS
# Those that mean something only where tokens become text.
TEXT_PARAMS = frozenset(
    {
        "adapter",
        "bad_words",
        "logprobs",
        "prompt_logprobs",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
    }
)


class MediaEncoding(enum.StrEnum):
    """How the bytes of a medium are to be read."""

    ARRAY = "array"  # audio f32 [samples]; image u8 [height, width, 3]; video u8 [frames, height, width, 3]
    FILE = "file"  # u8 [bytes] of a file in one of the formats that `media/` reads


MEDIA_MODALITIES = ("audio", "image", "video")
USE_AUDIO_IN_VIDEO = "use_audio_in_video"


FrameRate = Annotated[float, Meta(gt=0, le=1000)]  # frames per second


class Media(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One audio, image or video that a prompt refers to by its index; a sound track only by that of its video."""

    modality: str
    encoding: MediaEncoding
    tensor: TensorRef
    sample_rate: Annotated[int, Meta(ge=1000, le=768_000)] | None = None  # Hz, audio arrays only
    frames_per_second: FrameRate | None = None  # video arrays only
    sound: Annotated[int, Meta(ge=0, le=255)] | None = None  # of a video: index of the audio that is its sound track


class ContentPart(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A piece of a chat message: text, or the index of one of the request's media."""

    text: str | None = None
    media: Annotated[int, Meta(ge=0, le=255)] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.media is None):
            raise InvalidPayload("A content part must hold exactly one of text and media.")


class ChatMessage(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message of a conversation, with `role` as the model's chat template knows it.

    An answer may have called tools; the result of a call is a message that names its id.
    """

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: Annotated[tuple[ContentPart, ...], Meta(max_length=256)]
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_CALLS)] = ()
    tool_call_id: CallId = ""


def text_prompt(text: str) -> Prompt:
    """The prompt that is one text of the user."""
    return Prompt(messages=(ChatMessage(role="user", content=(ContentPart(text=text),)),))


class Prompt(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Chat `messages`, to which the chat template is applied, or `token_ids` (int32 bytes), used as they are.

    `embeds` stand in for all tokens of a prompt without media; `token_ids` may then be left out, or name a token for
    each position. `tools` go with messages.
    """

    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=1024)] = ()
    token_ids: bytes = b""
    media: Annotated[tuple[Media, ...], Meta(max_length=256)] = ()
    embeds: PromptEmbedsPayload | None = None
    tools: Tools | None = None

    def __post_init__(self) -> None:
        check_token_ids(self.token_ids)
        if self.embeds is not None:
            self._check_embeds(self.embeds)
        elif bool(self.messages) == bool(self.token_ids):
            raise InvalidPayload("A prompt must hold exactly one of messages and token_ids, and not an empty one.")
        if self.tools is not None and not self.messages:
            raise InvalidPayload("Tools go with messages, which the chat template puts them into.")
        for message in self.messages:
            for part in message.content:
                if part.media is not None and part.media >= len(self.media):
                    raise InvalidPayload(f"A content part names media {part.media}; only {len(self.media)} were sent.")
        if any(item.sound is not None for item in self.media):
            self._check_sounds()

    def _check_sounds(self) -> None:
        """Check the sound tracks: models take either those of all videos or other audio, never both."""
        videos = [item for item in self.media if item.modality == "video"]
        sounds = sorted(item.sound for item in self.media if item.sound is not None)
        audios = [index for index, item in enumerate(self.media) if item.modality == "audio"]
        named = {part.media for message in self.messages for part in message.content}
        if len(sounds) != len(videos) or any(item.sound is None for item in videos):
            what = f"{len(videos)} videos, {len(sounds)} of them with a sound track"
        elif sounds != audios or not named.isdisjoint(sounds):
            what = f"{len(audios)} sounds for the sound tracks of {len(videos)} videos"
        else:
            return
        raise InvalidPayload(
            f"The prompt has {what}: every video needs a track of its own, and there can be no other sound.",
            hint="Put other sounds into a request of their own, or leave out use_audio_in_video.",
            field=USE_AUDIO_IN_VIDEO,
        )

    @property
    def sounds(self) -> frozenset[int]:
        """Indices of the media that are sound tracks of others."""
        return frozenset(item.sound for item in self.media if item.sound is not None)

    def _check_embeds(self, embeds: PromptEmbedsPayload) -> None:
        if self.messages or self.media:
            raise InvalidPayload("prompt_embeds stand in for a whole prompt and cannot go with messages or media.")
        if self.token_ids and self.length != embeds.tensor.shape[0]:
            raise InvalidPayload(
                f"prompt_embeds have {embeds.tensor.shape[0]} positions, but there are {self.length} token ids."
            )

    @property
    def uses_tools(self) -> bool:
        """Whether it defines tools, or speaks of calls."""
        return self.tools is not None or any(message.tool_calls or message.tool_call_id for message in self.messages)

    @property
    def only_text(self) -> str | None:
        """The text of a prompt that is one text of the user and nothing else; `None` for any other prompt."""
        if len(self.messages) != 1 or self.media or self.tools is not None:
            return None
        (message,) = self.messages
        return message.content[0].text if message.role == "user" and len(message.content) == 1 else None

    @property
    def length(self) -> int:
        """Tokens or embeddings; 0 for messages, whose tokens are not known yet."""
        if self.token_ids or self.embeds is None:
            return len(self.token_ids) // TOKEN_BYTES
        return self.embeds.tensor.shape[0]

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        media = tuple(item.tensor for item in self.media)
        return media if self.embeds is None else (*media, self.embeds.tensor)


MAX_LOGPROBS = 20  # likeliest tokens per position
MAX_PROMPT_LOGPROBS = 32_768  # of a prompt: its tokens times the entries of each, which are made between two steps
PIECE_LOGPROBS = 4_096  # of those, in one message


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token, its text, and the logarithm of its probability. The text is empty within a character."""

    token_id: TokenId
    text: Annotated[str, Meta(max_length=4096)]
    logprob: float


class PositionLogprobs(Struct, frozen=True, array_like=True):
    """The token at one position of the answer, and the likeliest tokens there, the likeliest first."""

    token: TokenLogprob
    top: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()


class PromptPosition(Struct, frozen=True, array_like=True):
    """The token at one position of the prompt, how many tokens were likelier there plus one, and the likeliest."""

    token: TokenLogprob
    rank: Annotated[int, Meta(ge=1)]
    top: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()


MAX_PARAMETERS = 64
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "text": (str,), "bool": (bool,)}
_WORDS = {"int": "a whole number", "float": "a number", "text": "a text", "bool": "true or false"}


class Parameter(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A parameter that a request may set for a stage.

    Args:
        name: of a field of `StageParams`, or of an entry of its `extra_args`.
        kind: the type of its values.
        least: smallest number.
        most: largest number; of a text, the most characters.
        multiple_of: what a whole number must divide by; 0 for any.
        choices: the only texts; empty for any.
        default: what holds for a request that does not set it, for people to read; to clients, the pipeline's own.
        about: what it does, in a phrase.
    """

    name: Name
    kind: Literal["int", "float", "text", "bool"]
    least: float | None = None
    most: float | None = None
    multiple_of: Annotated[int, Meta(ge=0, le=65536)] = 0
    choices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    default: Scalar | None = None
    about: Annotated[str, Meta(max_length=256)] = ""

    def problem(self, value: object) -> str:
        """What is wrong with a value, as the end of a sentence that begins with the parameter; "" for nothing."""
        if not isinstance(value, _TYPES[self.kind]) or isinstance(value, bool) != (self.kind == "bool"):
            return f"must be {_WORDS[self.kind]}"
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            too_long = self.most is not None and len(value) > self.most
            return f"may have at most {self.most:g} characters; got {len(value)}" if too_long else ""
        number: Any = value
        low, high = self.least is not None and number < self.least, self.most is not None and number > self.most
        if not (low or high or number != number) and not (self.multiple_of and number % self.multiple_of):
            return ""
        return f"must be {self._range()}; got {number}"

    def _range(self) -> str:
        divides = f"a multiple of {self.multiple_of} " if self.multiple_of > 1 else ""
        if self.least is not None and self.most is not None:
            return f"{divides}from {self.least:g} to {self.most:g}"
        if self.most is not None:
            return f"{divides}at most {self.most:g}"
        return f"{divides}at least {self.least:g}" if self.least is not None else divides.strip() or "a number"


# Names of the additional information (`EngineFacts.wants_information`) of such a stage.
LANGUAGE = "language"  # text: one of the languages that the stage knows, in any case, or `AUTO`
INSTRUCTIONS = "instructions"  # text: how to speak, or which voice to make up
CLIP = "clip"  # f32 [samples], mono, within -1..1: the voice to speak with
CLIP_RATE = "clip_rate"  # Hz
TRANSCRIPT = "transcript"  # text: what is said in the clip, or in the recording whose words are to get times
AUTO = "auto"  # the model finds the language out by itself
SPEECH_INFORMATION = (LANGUAGE, INSTRUCTIONS, CLIP, CLIP_RATE, TRANSCRIPT)

Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class SpeechAbility(Struct, frozen=True, forbid_unknown_fields=True):
    """The abilities of a stage that speaks the text that it is given.

    Args:
        languages: those that can be asked for; the model finds the language out by itself otherwise.
        instructions: whether a request may or must say in words how to speak.
        clip: whether a request must bring a recording of the voice to speak with.
        min_clip_seconds: the shortest recording that shows a voice.
        max_clip_seconds: the longest recording.
        text_in_parts: whether it begins to speak while its text is still being written (`MoreText`).
    """

    languages: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    instructions: Literal["none", "optional", "required"] = "none"
    clip: Literal["none", "required"] = "none"
    min_clip_seconds: Seconds = 0.5
    max_clip_seconds: Seconds = 30.0
    text_in_parts: bool = False


class WordTime(Struct, frozen=True, array_like=True):
    """A word of a text, when it is said, and the place of its first character in the text.

    Args:
        word: as it is said, without the marks around it.
        start: in seconds from the beginning of the recording, as is `end`.
    """

    word: Annotated[str, Meta(max_length=4096)]
    start: Seconds
    end: Seconds
    place: Annotated[int, Meta(ge=0, le=2**31)]


class HearingAbility(Struct, frozen=True, forbid_unknown_fields=True):
    """The abilities of a pipeline that writes down the one recording it is given.

    A system message holds what the recording may be about: names and terms, or what was said before. A message of the
    assistant at the end is how the text begins; the answer is the rest of it.

    Args:
        languages: those that can be asked for (`LANGUAGE`); the model finds the language out by itself otherwise.
        max_seconds: the longest recording of a request.
    """

    languages: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    max_seconds: Seconds = 1200.0


class EngineFacts(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Properties of a loaded engine, against which requests are checked before the engine sees them.

    Args:
        sample_rate: of the sound that it makes, in Hz; 0 for none.
        max_input_tokens: longest input in tokens, 0 for unknown.
        embeds_width: width of the prompt embeddings that it takes as the entry stage; 0 if it takes none.
        wants_information: names of the additional information that a client may send to it.
        max_media: how many media a prompt may have, by modality; no limit for those that are missing.
        parameters: what requests may set for this stage besides `seed`; `None` for the parameters of its kind.
        speech: what it can do if it is an entry stage that speaks the text it is given.
        hearing: what the pipeline can do if this is its entry stage and it writes down what it hears; of a stage that
            gives words their times, for which recordings.
    """

    voices: tuple[str, ...] = ()
    sample_rate: int = 0
    max_input_tokens: int = 0
    embeds_width: int = 0
    wants_information: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    max_media: dict[str, Annotated[int, Meta(ge=0)]] = {}
    parameters: Annotated[tuple[Parameter, ...], Meta(max_length=MAX_PARAMETERS)] | None = None
    speech: SpeechAbility | None = None
    hearing: HearingAbility | None = None
