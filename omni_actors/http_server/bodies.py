"""Bodies of requests: bounded while they arrive, decoded into structs, with the field at fault named.

The decoder stops at the first error. Its messages quote what was sent; those made here do not, and they name the values
or fields that would be right, which the type's JSON schema knows.
"""

from __future__ import annotations

import asyncio
import binascii
import difflib
import re
from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct, defstruct, field, json
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from omni_actors.config.loading import fields_of, is_struct, types_at
from omni_actors.errors import suggest
from omni_actors.http_server.errors import HttpError, bad_field, too_large
from omni_actors.http_server.settings import ServerSettings
from omni_actors.protocol.fields import Priority, Seed
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget

T = TypeVar("T")
StrictT = TypeVar("StrictT", bound="Strict")

# Bounds of JSON, checked before it is decoded.
MAX_VALUES = 100_000  # members of objects and items of lists, after the first one of each
MAX_TOKEN_VALUES = 1_100_000  # the same where a list of token ids may be among them
MAX_CONTAINERS = 20_000  # lists and objects
MAX_TEXT_BYTES = 16 << 20  # all but media
MAX_QUOTES = 1_000_000  # around strings and in them
SHORT = 32_768  # bytes of a body that cannot exceed any of these

SEPARATORS = (b",", b":")
MEDIA_KEYS = frozenset({b"data", b"url", b"file_data", b"image_url"})  # whose strings are not decoded with the rest
MEDIA_BYTES = 1024  # a shorter string counts as text under any key

NAME_CHARACTERS = 100  # of an unknown field, in a message
PLACE = re.compile(r" - at `(key` in `)?\$((?:\.\w+|\[\d+\]|\[\.\.\.\])+)`\Z")  # such as $.messages[0].content
EXPECTED = re.compile(
    r"Expected `(?P<kinds>[\w |]+)`(?P<length> of length)?"
    r"(?: (?P<relation>[<>]=?) (?P<limit>\S+?)(?:\.0)?)?(?:, got `(?P<got>\w+)`)?"
)
RELATIONS = {"<=": "of at most {}", ">=": "of at least {}", "<": "below {}", ">": "above {}"}
TYPES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
STEP = re.compile(r"\.(\w+)|\[")


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of JSON

# The decoder holds the interpreter lock until it is done, and it counts the items of a list only when it has made them.
# `check_bounds` goes from quotation mark to quotation mark, and other threads can run in between.


def check_bounds(body: bytes, max_values: int) -> None:
    """Raise `HttpError` 413 if decoding this JSON would take long. Whether it is valid is not looked at."""
    if len(body) <= SHORT:
        return
    values = containers = text = position = begin = 0
    inside = is_medium = False
    key = b""
    for _ in range(MAX_QUOTES):
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        if not inside:
            between = body[position:end] if end - position <= MAX_TEXT_BYTES else b""
            text += end - position
            values += between.count(b",")
            if between not in SEPARATORS:
                containers += between.count(b"[") + between.count(b"{")
            is_medium = key in MEDIA_KEYS and between.strip() == b":"
            inside, begin = True, end + 1
        elif quote < 0 or not _escaped(body, position, quote):
            length = end - begin
            text += 0 if is_medium and length > MEDIA_BYTES else length
            key = body[begin:end] if length < MEDIA_BYTES else b""
            inside = False
        if text > MAX_TEXT_BYTES:
            raise _beyond(f"{MAX_TEXT_BYTES} bytes without its media")
        if values > max_values:
            raise _beyond(f"{max_values} members of objects and items of lists")
        if containers > MAX_CONTAINERS:
            raise _beyond(f"{MAX_CONTAINERS} lists and objects")
        if quote < 0:
            return
        position = quote + 1
    raise _beyond(f"{MAX_QUOTES} quotation marks")


def _escaped(body: bytes, start: int, quote: int) -> bool:
    """Whether an odd number of backslashes, back to `start` at most, precedes the quotation mark."""
    if body[quote - 1 : quote] != b"\\":
        return False
    before = body[start:quote]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _beyond(what: str) -> HttpError:
    return too_large(f"The body has more than {what}; send less in one request.", code="body_too_large")


# ---------------------------------------------------------------------------------------------------------------------
# JSON into structs


def decode(data: bytes | msgspec.Raw | dict[str, Any], kind: type[T], where: str = "") -> T:
    """Decode JSON, or what it was decoded to. Raises `HttpError` 400 for the first error.

    16.0 and "16" are accepted for 16, because some languages write their numbers so.

    Args:
        where: the field of the request that holds `data`, empty for the whole body.
    """
    try:
        if isinstance(data, dict):
            return msgspec.convert(data, kind, strict=False)
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _of(str(error), kind, where) from None
    except RecursionError:
        reason = "its lists and objects are nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except msgspec.DecodeError as error:
        reason = "it is empty" if not data else str(error).removeprefix("JSON is malformed: ")
        if reason == "Input data was truncated":
            reason = "it ends too early, or a \\u escape lacks its other half"
    message = f"The {where or 'body'} is not valid JSON: {reason}."
    raise HttpError(400, message, param=where or None, code="invalid_json")


def _of(message: str, kind: Any, where: str) -> HttpError:
    """Translate an error of msgspec: what is wrong, then at which path."""
    found = PLACE.search(message)
    what, in_a_key, path = (message[: found.start()], found[1], found[2]) if found else (message, None, "")
    kinds = types_at(filter(None, STEP.findall(path)), kind)
    place, name = _join(where, path), what.partition("`")[2].removesuffix("`")[:NAME_CHARACTERS]
    if what.startswith("Object contains unknown field `"):
        nearest = suggest(name, sorted({field for one in filter(is_struct, kinds) for field in fields_of(one)}))
        return _error(_join(where, f"{path}.{name}"), f"there is no such field.{nearest}", "unknown_parameter")
    if what.startswith("Object missing required field `"):
        return _error(_join(where, f"{path}.{name}"), "the field is missing.", "missing_required_parameter")
    if what.startswith("Invalid base64"):
        return _error(place, "this is not valid base64.", "invalid_base64")
    if what.startswith("Invalid "):  # value or enum value
        choices = [one for one in kinds if isinstance(one, str | int)]
        if len(choices) == 1:
            return _error(place, f"must be {choices[0]!r}.")
        given = what.partition("'")[2].removesuffix("'")[:NAME_CHARACTERS]
        close = difflib.get_close_matches(given, [str(choice) for choice in choices], n=1, cutoff=0.5)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        return _error(place, f"must be one of {', '.join(map(repr, choices))}.{meant}")
    expected, example = EXPECTED.fullmatch(what), ""
    if expected is not None and expected["kinds"].partition(" ")[0] == "object" and expected["got"] == "str":
        structs = [msgspec.structs.fields(one) for one in filter(is_struct, kinds)]
        needed = [field.encode_name for fields in structs for field in fields if field.required]
        example = f', such as {{"{needed[0]}": ...}}' if len(needed) == 1 else ""
    return _error(place, f"{'each key ' if in_a_key else ''}{in_words(what)}{example}.")


def in_words(what: str) -> str:
    """Say in words what msgspec expects, such as "Expected `int | null`, got `str`"."""
    found = EXPECTED.fullmatch(what)
    if found is None:
        return f"{what[:1].lower()}{what[1:].replace('`', '')}"
    kinds = found["kinds"].split(" | ")
    words = [TYPES.get(kind, kind) for kind in kinds]
    wanted = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if found["relation"]:
        unit = {"str": " character", "array": " item", "object": " member"}[kinds[0]] if found["length"] else ""
        unit += "s" if unit and found["limit"] != "1" else ""
        wanted += f" {RELATIONS[found['relation']].format(found['limit'] + unit)}"
    got = f", not {TYPES.get(found['got'], found['got'])}" if found["got"] else ""
    return f"must be {wanted}{got}"


def _error(param: str, message: str, code: str = "invalid_value") -> HttpError:
    return bad_field(param, f"{param}: {message}", code) if param else HttpError(400, f"body: {message}", code=code)


def _join(where: str, path: str) -> str:
    path = path.replace("[...]", "")  # msgspec does not say which key of a mapping
    return f"{where}{path}" if where else path.removeprefix(".")


def base64_string(data: bytes) -> msgspec.Raw:
    """Bytes in base64 as a string of JSON. msgspec takes twice as long for it, and does it on the server's loop."""
    return msgspec.Raw(b'"%b"' % binascii.b2a_base64(data, newline=False))


MAX_TEXT = 4_000_000  # characters
MAX_TOKENS = 1_000_000
MAX_FREE_FORM = 65_536  # bytes of `stage_params` and of `metadata`
MAX_IGNORED = 64  # bytes of a value that is ignored where others are refused
NULLABLE_OBJECT = ["object", "null"]

ABSENT: Any = field(default_factory=lambda: Raw(b"null"))  # a factory, because OpenAPI could not show the value

BodyText = Annotated[str, Meta(max_length=MAX_TEXT)]
OptionalText = BodyText | None
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Timeout = Annotated[float, Meta(gt=0, le=86400)]
Modalities = Annotated[list[str], Meta(min_length=1, max_length=8)]

# A long string, such as base64, stays in the body until `media.py` reads it.
LongString = Annotated[Raw, Meta(extra_json_schema={"type": "string"})]
OptionalLongString = Annotated[Raw, Meta(extra_json_schema={"type": ["string", "null"]})]
PARAMS_SCHEMA = {"$ref": "#/components/schemas/StageParams"}
ParamsByStage = Annotated[Raw, Meta(extra_json_schema={"type": NULLABLE_OBJECT, "additionalProperties": PARAMS_SCHEMA})]
Anything = Annotated[Raw, Meta(extra_json_schema={})]  # ignored
Nothing = Annotated[list[Any], Meta(max_length=0)] | None

# ---------------------------------------------------------------------------------------------------------------------
# Fields of OpenAI's and vLLM's requests that are accepted and ignored, by name. `ANY` takes every value. The others ask
# for what is not here: null and the listed values ask for nothing, and everything else is refused.

ANY = None
NOTHING: tuple[Any, ...] = (False, "", [], {})  # and 0, which equals the first one
Ignored = Mapping[str, tuple[Any, ...] | None]


def _ignored(*of: Ignored, effectless: str = "", absent: str = "", **only: tuple[Any, ...]) -> Ignored:
    """Join fields: those that take every value, those that must be empty, and the others with their values."""
    joined: dict[str, tuple[Any, ...] | None] = {}
    for fields in (*of, dict.fromkeys(effectless.split(), ANY), dict.fromkeys(absent.split(), NOTHING), only):
        joined |= fields
    return joined


OF_OPENAI = _ignored(
    effectless="service_tier safety_identifier prompt_cache_key prompt_cache_retention", absent="prompt_cache_options"
)
OF_TEXTS = _ignored(
    OF_OPENAI,
    effectless="user metadata store session_id truncation_side",
    absent="cache_salt repetition_detection request_id thinking_token_budget truncate_prompt_tokens echo "
    "return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids use_beam_search watermarking "
    "routed_experts_prompt_start logprob_token_ids ec_transfer_params kv_transfer_params vllm_xargs",
    length_penalty=(1,),
    stream_interval=(1,),
    mm_payload=("tensors",),
)
OF_CHATS = _ignored(
    OF_TEXTS,
    effectless="include_reasoning reasoning_effort verbosity",
    absent="chat_template moderation prediction web_search_options add_special_tokens continue_final_message "
    "return_prompt_text documents functions media_io_kwargs",
    add_generation_prompt=(True,),
    function_call=("none", "auto"),
    chat_template_kwargs=({}, {"enable_thinking": False}, {"add_generation_prompt": True}),
)
OF_COMPLETIONS = _ignored(
    OF_TEXTS,
    absent="prompt_embeds suffix",
    add_special_tokens=(True,),
    best_of=(1,),
    mm_processor_kwargs=({}, {"use_audio_in_video": False}),
)
OF_RESPONSES = _ignored(
    OF_OPENAI,
    absent="conversation max_tool_calls moderation prompt background context_management reasoning",
    truncation=("disabled",),
)
OF_IMAGES = _ignored(
    effectless="user safety_identifier moderation quality", absent="complexity frame_count frame_duration_ms svg"
)
OF_NEW_IMAGES = _ignored(OF_IMAGES, absent="style")
OF_EDITS = _ignored(OF_IMAGES, absent="markup input_fidelity")
OF_SPEECH = _ignored(  # of vLLM-Omni and those that follow it
    effectless="stream", absent="max_new_tokens non_streaming_mode ref_audio ref_text task_type x_vector_only_mode"
)
OF_TRANSCRIPTIONS = _ignored(absent="include keywords languages known_speaker_names known_speaker_references")

INSTEAD = {
    "chat_template": "The template is the model's own.",
    "chat_template_kwargs": "The model's template takes no arguments.",
    "continue_final_message": "The answer is always a message of its own.",
    "conversation": "Use previous_response_id, or send the items again.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "keywords": "Put them into prompt.",
    "languages": "Give one as language.",
    "max_new_tokens": "Give max_tokens of the talker in stage_params.",
    "non_streaming_mode": "A text is read while it is spoken.",
    "ref_audio": "Send the recording to /v1/audio/voices, and name the voice.",
    "ref_text": "Send it as transcript of the voice to /v1/audio/voices.",
    "request_id": "The response's x-request-id names the request.",
    "style": "Describe it in the prompt.",
    "task_type": "Each checkpoint has one: give the voice or the instructions that it takes.",
    "truncate_prompt_tokens": "A prompt that is too long is an error, never cut.",
    "truncation": "A prompt that is too long is an error, never cut.",
}


class Strict(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a body; unknown fields are errors."""


def ignoring(kind: type[StrictT], ignored: Ignored, parameters: Iterable[str] = ()) -> type[StrictT]:
    """Derive a struct that also has ignored fields, and parameters of a stage with the limits that they have there."""
    fields = [(name, get_type_hints(StageParams, include_extras=True)[name], None) for name in parameters]
    for name, values in ignored.items():
        # The order keeps Python from taking one of two equal types, such as those of [null, 0] and [null, false].
        schema: dict[str, Any] = {} if values is ANY else {"enum": [*values, None]}
        fields.append((name, Annotated[Raw, Meta(extra_json_schema=schema)], ABSENT))
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "module": kind.__module__}
    derived = defstruct(kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__}, **options)
    return derived  # type: ignore[return-value]  # which says nothing of the bases


def refuse_effects(body: Strict, ignored: Ignored) -> None:
    """Raise `HttpError` 400 for the first field that asks for what is not here."""
    for name, values in ignored.items():
        value: Raw = getattr(body, name)
        if values is ANY or is_null(value):
            continue
        if len(memoryview(value)) <= MAX_IGNORED and decode(value, object) in values:
            continue
        only = "" if values is NOTHING else ", or give " + " or ".join(json.encode(each).decode() for each in values)
        hint = INSTEAD.get(name) or f"Leave it out{only}."
        raise bad_field(name, f"{name} is not supported. {hint}", "unsupported_parameter")


# ---------------------------------------------------------------------------------------------------------------------
# Fields of all requests


class Submission(Strict, frozen=True, kw_only=True):
    """The fields of all requests that reach the pipeline."""

    model: str | None = None  # the first of those that are served
    seed: Seed | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None


class StagedSubmission(Submission, frozen=True, kw_only=True):
    """The same with parameters by stage."""

    stage_params: ParamsByStage = ABSENT

    def params_by_stage(self) -> dict[str, StageParams]:
        """Decode `stage_params`. Raises `HttpError` that names the stage and the field."""
        return decoded_params(self.stage_params)


def decoded_params(stage_params: Raw) -> dict[str, StageParams]:
    """Parameters by stage. Raises `HttpError` that names the stage and the field."""
    found = {}
    for stage, params in (free_form(stage_params, dict[str, Raw], "stage_params") or {}).items():
        where = f"stage_params.{stage[:64]}"
        found[stage] = decode(params, StageParams, where)
        if found[stage].prompt_logprobs is not None:  # most answers have no place for them
            param = f"{where}.prompt_logprobs"
            message = f"{param} is not supported. Give prompt_logprobs as a field of a chat or a text completion."
            raise bad_field(param, message, "unsupported_parameter")
    return found


def free_form(value: Raw, kind: type[T], name: str) -> T | None:
    """Decode a field of any form, such as `metadata`. Raises `HttpError` if it does not fit or is long."""
    if len(memoryview(value)) > MAX_FREE_FORM:
        raise bad_field(name, f"{name} is limited to {MAX_FREE_FORM} bytes.")
    return None if is_null(value) else decode(value, kind, name)


def is_null(value: Raw) -> bool:
    """Whether a field is null, or absent."""
    return bytes(memoryview(value)[:5]) == b"null"


BODIES: ContextVar[tuple[Budget, Hashable]] = ContextVar("bodies")  # and the holder: the request of this task
TOO_MANY = "The server holds too many bytes of other requests: try again."


def take_bytes(bodies: Budget, holder: Hashable, size: int) -> None:
    """Count bytes of a request or session. Raises `HttpError` 503 if all together hold too many."""
    if not bodies.fits(size):
        raise HttpError(503, TOO_MANY, code="overloaded")
    bodies.take(holder, size)


def reserve(size: int) -> None:
    """Count bytes for the request that this task handles, if it counts any. Raises as `take_bytes`."""
    if (found := BODIES.get(None)) is not None:
        take_bytes(*found, size)


REFERENCE = "#/components/schemas/{name}"
JSON, FORM = "application/json", "multipart/form-data"

FILE = "file"
ONE_FILE = {FILE: 1}
LIST = "[]"  # at the end of the name of each item of a list in a form
MAX_FIELDS = 64  # of a form


class JsonBody(Generic[StrictT]):
    """A body of JSON, decoded into a struct.

    Args:
        ignored: further fields that are accepted.
        max_values: members of objects and items of lists that a body may have.
        parameters: further fields, which are parameters of a stage.
    """

    def __init__(
        self, kind: type[StrictT], ignored: Ignored, max_values: int = MAX_VALUES, parameters: Iterable[str] = ()
    ) -> None:
        self.kind = ignoring(kind, ignored, parameters)
        self._ignored = ignored
        self._max_values = max_values

    async def read(self, request: Request, settings: ServerSettings) -> StrictT:
        """Receive and decode the body. Raises `HttpError` for the first thing that is wrong with it."""
        body = await received(request, settings, JSON)
        return self.decoded(body) if len(body) <= SHORT else await asyncio.to_thread(self.decoded, body)

    def decoded(self, body: bytes) -> StrictT:
        """Decode the body. Raises `HttpError` 400 or 413."""
        check_bounds(body, self._max_values)
        fields = decode(body, self.kind)
        refuse_effects(fields, self._ignored)
        return fields

    def described(self) -> dict[str, Any]:
        """The OpenAPI `requestBody`."""
        schema = {"$ref": REFERENCE.format(name=self.kind.__name__)}
        return {"required": True, "content": {JSON: {"schema": schema}}}


class FormFile(NamedTuple):
    """A file of a form, and the field that it came in."""

    field: str
    name: str
    data: bytes


class Form(NamedTuple, Generic[StrictT]):
    """A form that a client has sent."""

    fields: StrictT
    files: list[FormFile]


class FormBody(Generic[StrictT]):
    """A multipart body: files, and fields that are decoded into a struct.

    Args:
        ignored: further fields that are accepted.
        files: how many files each field may have, by its name. `[]` at the end of a name is no part of it.
        needed: the field that must have one.
    """

    def __init__(
        self, kind: type[StrictT], ignored: Ignored, files: Mapping[str, int] = ONE_FILE, needed: str | None = FILE
    ) -> None:
        self._json = JsonBody(kind, ignored)
        self.kind = self._json.kind
        self._files = files
        self._needed = needed

    async def read(self, request: Request, settings: ServerSettings) -> Form[StrictT]:
        """Receive and decode the body. Raises `HttpError` for the first thing that is wrong with it."""
        body = await received(request, settings, FORM)

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield body

        parser = MultiPartParser(request.headers, pieces(), max_files=MAX_FIELDS, max_fields=MAX_FIELDS)
        parser.spool_max_size = len(body)  # a file on disk would fail uploads when the disk is full
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HttpError(400, f"{error.message.rstrip('.')}.", code="http_400") from None
        fields: dict[str, Any] = {}
        files: list[FormFile] = []
        try:
            for full_name, value in form.multi_items():
                name = full_name.removesuffix(LIST)
                if not isinstance(value, str):
                    files.append(FormFile(name, value.filename or "file", await value.read()))
                    self._check_files(files)
                elif name in self._files:
                    raise bad_field(name, f"{name}: must be a file.")
                elif name != full_name:
                    fields.setdefault(name, []).append(value)
                elif name in fields:
                    raise bad_field(name[:100], "The field is given twice.")
                else:
                    fields[name] = value
        finally:
            await form.close()
        if self._needed is not None and all(file.field != self._needed for file in files):
            raise bad_field(self._needed, f"{self._needed}: the field is missing.", "missing_required_parameter")
        return Form(self._json.decoded(json.encode(fields)), files)

    def _check_files(self, files: list[FormFile]) -> None:
        """Raise `HttpError` 400 if the last one is one too many."""
        name = files[-1].field
        most = self._files.get(name, 0)
        if not most:
            only = f"Only {' and '.join(self._files)} may be a file." if self._files else "The field must be a text."
            raise bad_field(name[:100], only)
        if sum(file.field == name for file in files) > most:
            raise bad_field(name, f"{name}: there may be {most} at most.")

    def described(self) -> dict[str, Any]:
        """The OpenAPI `requestBody`."""
        own = msgspec.json.schema_components([self.kind], ref_template=REFERENCE)[1][self.kind.__name__]
        lists = {name for name, field in own["properties"].items() if "array" in str(field)}
        properties = {f"{name}{LIST}" if name in lists else name: field for name, field in own["properties"].items()}
        one: dict[str, Any] = {"type": "string", "format": "binary"}
        for name, most in self._files.items():
            several = {"type": "array", "items": one, "minItems": 1, "maxItems": most}
            properties[name] = one if most == 1 else several
        schema = {
            "type": "object",
            "properties": properties,
            "required": [*([self._needed] if self._needed is not None else ()), *own.get("required", ())],
            "additionalProperties": False,
        }
        return {"required": True, "content": {FORM: {"schema": schema}}}


async def received(request: Request, settings: ServerSettings, media_type: str) -> bytes:
    """The whole body, which counts towards the bytes of all requests.

    The type must be declared, because browsers send other types to foreign sites without asking.

    Raises:
        HttpError: 408, 413 or 415.
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != media_type:
        message = f"The Content-Type is {given or 'missing'!r}; it must be {media_type}."
        raise HttpError(415, message, code="unsupported_media_type")
    limit, seconds = settings.body_bytes, settings.read_timeout
    too_large = HttpError(413, f"The body exceeds the limit of {limit} bytes.", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                if len(body) + len(piece) > limit:
                    raise too_large  # before it is reserved: a body that never fits must not say "retry"
                reserve(len(piece))
                body += piece
    except ClientDisconnect:
        raise HttpError(400, "The connection ended before the body did.", code="incomplete_body") from None
    except TimeoutError:
        raise HttpError(408, f"The body did not arrive completely within {seconds:g} s.", code="body_timeout") from None
    return bytes(body)
