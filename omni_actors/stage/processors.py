"""Input processors: turn the output of the stages before into this stage's engine input. Pure Python, one per request.

A processor takes pieces in order and returns actions: `Start` once, then `Extend` or `ExtendText` for rows, tokens or
text that are streamed into a running request; or `Skip` if there is nothing to compute.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct

from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import HostTensor, Scalar, unpack_token_ids
from omni_actors.protocol.messages import LATENTS, PICTURE, TEXT, UNHEARD, Chunk
from omni_actors.protocol.payloads import PROMPT_EMBEDS, TRANSCRIPT, InformationValue, Prompt, text_prompt
from omni_actors.stage.engine_interface import EngineFacts, StageInputs


class InputPiece(Struct, frozen=True):
    """One chunk of a source stage's output, decoded. `start` is the position of its first row or token."""

    token_ids: Sequence[int] = ()
    tensors: Mapping[str, HostTensor] = {}
    scalars: Mapping[str, Scalar] = {}
    start: int = 0
    final: bool = False
    lists: Mapping[str, Sequence[Scalar]] = {}

    @classmethod
    def of(cls, chunk: Chunk, envelope: Envelope[Any]) -> InputPiece:
        """Decode `envelope`, whose body is `chunk`. Raises `InvalidPayload` if two of its tensors have one name."""
        tensors = {name: envelope.tensor(ref) for name, ref in chunk.tensors.items()}
        named = chunk.information.values(envelope.tensor)
        more = {name: value for name, value in named.items() if isinstance(value, HostTensor)}
        if twice := tensors.keys() & more.keys():
            raise InvalidPayload(f"Two tensors of a chunk are called {min(twice)!r}.")
        scalars = {name: value for name, value in named.items() if isinstance(value, Scalar)}
        lists = {name: value for name, value in named.items() if not isinstance(value, HostTensor | Scalar)}
        return cls(unpack_token_ids(chunk.token_ids), tensors | more, scalars, chunk.start, chunk.final, lists)


class Start(Struct, frozen=True):
    """Start the request in the engine."""

    inputs: StageInputs


class Extend(Struct, frozen=True):
    """Append input to the started request; `complete` says that no more follows."""

    rows: HostTensor | None
    complete: bool
    token_ids: Sequence[int] = ()


class ExtendText(Struct, frozen=True):
    """Append text to the prompt of the started request; `complete` says that no more follows."""

    text: str
    complete: bool


class Skip(Struct, frozen=True):
    """End the request without output: its source had nothing for this stage."""


Action = Start | Extend | ExtendText | Skip


def start_of(prompt: Prompt, envelope: Envelope[Any], facts: EngineFacts) -> Start:
    """Start the entry stage with `prompt`, which came in `envelope`.

    Raises:
        InvalidRequest: the prompt has embeddings, and the engine takes none or those of another width.
    """
    media = [envelope.tensor(item.tensor) for item in prompt.media]
    tensors: dict[str, HostTensor] = {}
    if prompt.embeds is not None:
        width = prompt.embeds.tensor.shape[1]
        if not facts.embeds_width:
            raise InvalidRequest(f"{PROMPT_EMBEDS}: this stage takes no prompt embeddings.", hint="Send token ids.")
        if width != facts.embeds_width:
            raise InvalidRequest(
                f"{PROMPT_EMBEDS} have {width} values per position; this model takes {facts.embeds_width}."
            )
        tensors[PROMPT_EMBEDS] = envelope.tensor(prompt.embeds.tensor)
    return Start(StageInputs(prompt=prompt, media=media, tensors=tensors))


class StreamProcessor(ABC):
    """Turns the chunks of one request into engine input. The YAML names a subclass by name or by dotted path.

    Args:
        start_after: steps of the source to wait for before the stage starts; 0 for all of them.
        sources: names of the source stages.

    Attributes:
        wants_information: names of the additional information that a client may send to this class.
        information: what the client sent for this stage: scalars, lists and tensors, set before the first `feed`.
        started: whether a `Start` was returned.
        received: positions, tokens or characters so far.
    """

    wants_information: ClassVar[tuple[str, ...]] = ()
    information: Mapping[str, InformationValue] = {}
    started = False
    received = 0

    def __init__(self, start_after: int, sources: tuple[str, ...]) -> None:
        self.start_after = start_after
        self.sources = sources

    @abstractmethod
    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Take the next piece from a source stage. Raises `InvalidPayload` if it does not fit the earlier ones."""


class Passthrough(StreamProcessor):
    """Waits for the final piece of every source, then starts with the tokens of all of them in the order of `from`.

    Tensors, scalars and lists go by name: a later piece replaces what an earlier one sent under the same name.
    """

    def __init__(self, start_after: int, sources: tuple[str, ...]) -> None:
        super().__init__(start_after, sources)
        self._token_ids: dict[str, list[int]] = {source: [] for source in sources}
        self._tensors: dict[str, HostTensor] = {}
        self._scalars: dict[str, Scalar] = {}
        self._lists: dict[str, Sequence[Scalar]] = {}
        self._open = set(sources)

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Collect the piece; start when every source has sent its last."""
        tokens = self._token_ids[source]
        tokens += _unseen_tokens(piece, len(tokens))
        self._tensors.update(piece.tensors)
        self._scalars.update(piece.scalars)
        self._lists.update(piece.lists)
        if piece.final:
            self._open.discard(source)
        if self._open:
            return []
        joined = [token for source in self.sources for token in self._token_ids[source]]
        return [Start(StageInputs(joined, self._tensors, self._scalars, lists=self._lists))]


class PicturesOnly(Passthrough):
    """Like `Passthrough`, but for pictures alone, and with nothing to do for a prompt that has none."""

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Collect the pictures of a piece; start, or skip, when every source has sent its last."""
        pictures = {name: tensor for name, tensor in piece.tensors.items() if name.startswith(PICTURE)}
        only = InputPiece(tensors=pictures, start=piece.start, final=piece.final)
        actions = super().feed(source, only)
        return [Skip()] if actions and not self._tensors else actions


class Thinker2Talker(StreamProcessor):
    """Follows a source position by position: first those of its prompt, then those of its reply.

    A position comes as a row of `rows` or as a token id, whichever the source gives; other tensors go by name. The
    stage starts after `start_after` steps of the source, with the P positions of the prompt and `start_after - 1` of
    the reply; every later position extends it. Rows are cut: `prompt_rows` has the prompt's and the first of the reply,
    `reply_rows` the others. A reply without positions (the thinker stopped at its first token) has no speech.
    """

    def __init__(self, start_after: int, sources: tuple[str, ...]) -> None:
        super().__init__(start_after, sources)
        self._rows: list[HostTensor] = []
        self._token_ids: list[int] = []
        self._tensors: dict[str, HostTensor] = {}
        self._prompt_tokens: int | None = None

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Collect positions until the talker can start, then pass on those that it has not had."""
        if "prompt_tokens" in piece.scalars:
            self._prompt_tokens = _whole_number(piece.scalars["prompt_tokens"], "prompt_tokens")
        self._tensors |= {name: tensor for name, tensor in piece.tensors.items() if name != "rows"}
        rows = self._unseen_rows(piece)
        token_ids = _unseen_tokens(piece, self.received)
        if rows is not None and token_ids:
            raise InvalidPayload("Positions came as rows and as token ids in one piece.")
        self.received += len(token_ids) if rows is None else rows.shape[0]
        if self.started:
            news = rows is not None or token_ids or piece.final
            return [Extend(rows, piece.final, token_ids)] if news else []
        self._token_ids += token_ids
        if rows is not None:
            self._rows.append(rows)
        return self._start_if_enough(piece.final)

    def _unseen_rows(self, piece: InputPiece) -> HostTensor | None:
        rows = piece.tensors.get("rows")
        if rows is None:
            return None
        if len(rows.shape) != 2:
            raise InvalidPayload(f"Rows need the shape [rows, width], got {list(rows.shape)}.")
        if rows.shape[0] == 0:
            return None
        if piece.start > self.received:
            raise InvalidPayload(f"Rows from position {piece.start} came where {self.received} was due.")
        fresh = slice_rows(rows, self.received - piece.start)
        return fresh if fresh.shape[0] else None

    def _start_if_enough(self, final: bool) -> list[Action]:
        prompt = self._prompt_tokens
        reply = self.received - prompt if prompt is not None else 0
        if prompt is None and self.received:
            raise InvalidPayload("Positions came without prompt_tokens, which says where the reply begins.")
        if final and reply < 1:
            return [Skip()]
        wanted = max(1, self.start_after - 1)
        if prompt is None or reply < 1 or not (final or (self.start_after and reply >= wanted)):
            return []
        tensors = dict(self._tensors)
        if self._rows:
            rows = concatenate_rows(self._rows)
            tensors["prompt_rows"] = slice_rows(rows, 0, prompt + 1)
            if reply > 1:
                tensors["reply_rows"] = slice_rows(rows, prompt + 1)
        self._rows.clear()
        self.started = True
        inputs = StageInputs(self._token_ids, tensors, {"prompt_tokens": prompt}, complete=final)
        return [Start(inputs)]


class Talker2Code2Wav(StreamProcessor):
    """Streams the talker's codec tokens, which do not include its end token, to the vocoder.

    The vocoder starts with the first `start_after` tokens and gets the others as they come. It decides itself where to
    cut the utterance for decoding. A frame of several codes is as many tokens. `UNHEARD` comes with the first piece.
    """

    def __init__(self, start_after: int, sources: tuple[str, ...]) -> None:
        super().__init__(start_after, sources)
        self._waiting: list[int] = []
        self._scalars: dict[str, Scalar] = {}

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Collect codec tokens until the vocoder can start, then pass on those that it has not had."""
        tokens = _unseen_tokens(piece, self.received)
        self.received += len(tokens)
        if self.started:
            return [Extend(None, piece.final, tokens)] if tokens or piece.final else []
        self._waiting.extend(tokens)
        if UNHEARD in piece.scalars:
            self._scalars[UNHEARD] = _whole_number(piece.scalars[UNHEARD], UNHEARD)
        if piece.final and not self._waiting:
            return [Skip()]
        if not piece.final and not 0 < self.start_after <= self.received:
            return []
        self.started = True
        return [Start(StageInputs(token_ids=self._waiting, scalars=self._scalars, complete=piece.final))]


class Latents2Image(StreamProcessor):
    """Streams the latents of a picture to the stage that decodes them: first those of previews, then the last ones.

    The engine gets each as it comes; only those of the picture itself come with `complete`.
    """

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Pass on latents. Raises `InvalidPayload` if the source ends without those of the picture."""
        latents = piece.tensors.get(LATENTS)
        if latents is None:
            if piece.final:
                raise InvalidPayload(f"Stage {source!r} ended without the latents of the picture.")
            return []
        if self.started:
            return [Extend(latents, piece.final)]
        self.started = True
        inputs = StageInputs(piece.token_ids, {LATENTS: latents}, piece.scalars, complete=piece.final)
        return [Start(inputs)]


def settled(text: str) -> int:
    """Length of the beginning of a text whose tokens do not depend on what follows: it ends with a whole word.

    Tokenizers of the GPT family cut a text before what follows a letter or a digit and is neither; a mark may still
    become one character with the letter.
    """
    for place in range(len(text) - 1, 0, -1):
        after = text[place]
        if text[place - 1].isalnum() and not after.isalnum() and not unicodedata.category(after).startswith("M"):
            return place
    return 0


class Text2Speech(StreamProcessor):
    """Passes on the words of a text as they are written, by the stage before or by a client, to a stage that speaks.

    White space around the text is left out.
    """

    _waiting = ""

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Take the text of the stage before."""
        text = piece.scalars.get(TEXT, "")
        if not isinstance(text, str):
            raise InvalidPayload(f"{TEXT} must be a text.")
        return self.add(text, piece.start, piece.final)

    def add(self, text: str, start: int, final: bool) -> list[Action]:
        """Take text from character `start` on. Raises `InvalidPayload` for a gap."""
        if start > self.received:
            raise InvalidPayload(f"{TEXT} from character {start} came where text from {self.received} was due.")
        fresh = text[self.received - start :]
        self.received += len(fresh)
        waiting = self._waiting + fresh if self.started else (self._waiting + fresh).lstrip()
        cut = len(waiting.rstrip()) if final else settled(waiting)
        words, self._waiting = waiting[:cut], waiting[cut:]
        if self.started:
            return [ExtendText(words, final)] if words or final else []
        if not words:
            return [Skip()] if final else []
        self.started = True
        return [Start(StageInputs(prompt=text_prompt(words), complete=final, in_parts=True))]


class Sound2Words(Passthrough):
    """Brings the sound of a prompt stage together with the text of another stage, or with one that the client sent."""

    wants_information = (TRANSCRIPT,)
    _text = ""

    def feed(self, source: str, piece: InputPiece) -> list[Action]:
        """Collect a piece; start with the whole, or skip if nothing is said."""
        text = piece.scalars.get(TEXT, "")
        if not isinstance(text, str) or (text and piece.start != len(self._text)):
            raise InvalidPayload(f"{TEXT} from {piece.start} came where text from {len(self._text)} was due.")
        self._text += text
        if not super().feed(source, piece):
            return []
        said = self.information.get(TRANSCRIPT, self._text)
        if not isinstance(said, str):
            raise InvalidRequest(f"{TRANSCRIPT} must be a text.", field=TRANSCRIPT)
        return [Start(StageInputs(tensors=self._tensors, scalars={TEXT: said}))] if said.strip() else [Skip()]


PROCESSORS: dict[str, type[StreamProcessor]] = {
    "passthrough": Passthrough,
    "pictures": PicturesOnly,
    "thinker2talker": Thinker2Talker,
    "talker2code2wav": Talker2Code2Wav,
    "latents2image": Latents2Image,
    "text2speech": Text2Speech,
    "sound2words": Sound2Words,
}


def _unseen_tokens(piece: InputPiece, received: int) -> Sequence[int]:
    """Return the tokens of a piece that are new; raises `InvalidPayload` for a gap."""
    if not piece.token_ids:
        return ()
    if piece.start > received:
        raise InvalidPayload(f"Tokens from position {piece.start} came where {received} was due.")
    return piece.token_ids[received - piece.start :]


def _whole_number(value: Scalar, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidPayload(f"{name} must be a whole number from 0, got {value!r}.")
    return value


def slice_rows(tensor: HostTensor, start: int, stop: int | None = None) -> HostTensor:
    """Return rows `start` to `stop` of a tensor [rows, ...], as a view of its data."""
    length = tensor.shape[0]
    start = min(start, length)
    stop = length if stop is None else min(stop, length)
    data = memoryview(tensor.data).cast("B")
    row_bytes = data.nbytes // length if length else 0
    return HostTensor(tensor.dtype, (stop - start, *tensor.shape[1:]), data[start * row_bytes : stop * row_bytes])


def concatenate_rows(tensors: Sequence[HostTensor]) -> HostTensor:
    """Concatenate tensors [rows_i, ...]; raises `InvalidPayload` unless dtypes and widths agree."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for tensor in tensors:
        if tensor.dtype is not first.dtype or tensor.shape[1:] != first.shape[1:]:
            raise InvalidPayload(
                f"Rows of {tensor.dtype} {list(tensor.shape)} do not continue {first.dtype} {list(first.shape)}."
            )
    rows = sum(tensor.shape[0] for tensor in tensors)
    return HostTensor(first.dtype, (rows, *first.shape[1:]), b"".join(tensor.data for tensor in tensors))
