"""A pipeline that hears, beside one that does not hear or hears less well: it writes down what is said.

With the key `http.transcriber` recordings and the turns of realtime sessions are written down by that pipeline. Where
the model itself does not hear, each sound of a prompt is replaced by its text: any chat model can be spoken to.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from omni_actors.client import AsyncOmniClient, WordTimes
from omni_actors.errors import OmniError, RequestTimeout
from omni_actors.host.addresses import is_tcp
from omni_actors.host.processes import end_tasks
from omni_actors.logs import get_logger
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import LANGUAGE, TRANSCRIPT, StageParams, WordTime

logger = get_logger(__name__)

ASK_SECONDS = 1.0  # for its description, the first time
AWAY_SECONDS = 10.0  # before a pipeline that did not answer is asked again whether it knows times of words
WORDS_SECONDS = 5.0  # for times of the words of a sentence, or of an answer
KEPT = 1024  # texts of sounds: those of earlier turns come again with each question
NOTHING = "(nothing that could be understood)"


class Ears:
    """The connection to that pipeline, which lasts from when `client` is entered until `close`.

    Args:
        endpoint: its client endpoint.
        keys: folder of CURVE keys, for an endpoint with tcp://.
    """

    def __init__(self, endpoint: str, keys: str | None) -> None:
        self.client = AsyncOmniClient(endpoint, keys=keys if is_tcp(endpoint) else None)
        self._description: Description | None = None
        self._ask_again = 0.0  # when, about times of words (monotonic clock)
        self._texts: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()

    async def close(self) -> None:
        """End what is being written down, and the connection."""
        await end_tasks(*self._texts.values())
        await self.client.close()

    async def describe(self) -> Description:
        """What the pipeline is, as it was when it first answered. Raises `RequestTimeout`."""
        if self._description is None:
            self._description = await self.client.describe(ASK_SECONDS)
        return self._description

    async def heard(self, prompt: Any, **options: Any) -> Any:
        """The prompt with texts instead of sounds, each of which is written down once. Raises `OmniError`."""
        messages = prompt["messages"] if isinstance(prompt, Mapping) else prompt
        if isinstance(messages, str):
            return prompt
        written = await asyncio.gather(*(self._message(message, options) for message in messages))
        return {**prompt, "messages": written} if isinstance(prompt, Mapping) else written

    async def _message(self, message: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if content is None or isinstance(content, str):
            return message
        return {**message, "content": await asyncio.gather(*(self._part(part, options) for part in content))}

    async def _part(self, part: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "text", "text": await self.text(part, **options)} if part["type"] == "audio" else part

    async def text(self, sound: Mapping[str, Any], **options: Any) -> str:
        """What is said in the part of a message that is a sound. Raises `OmniError`."""
        return await asyncio.shield(self.listen(sound, {}, options))  # another request may wait for the same text

    def listen(
        self, sound: Mapping[str, Any], about: Mapping[str, Any], options: Mapping[str, Any]
    ) -> asyncio.Task[str]:
        """Have a sound written down, once: `text` has the result. `about` is what `to_write_down` takes."""
        digest = _digest(sound["audio"])
        task = self._texts.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._write_down(sound, about, options), name="transcript")
            self._texts[digest] = task
        self._texts.move_to_end(digest)
        while len(self._texts) > KEPT and self._texts[next(iter(self._texts))].done():
            self._texts.popitem(last=False)
        return task

    async def aligns(self) -> bool:
        """Whether this pipeline knows when words are said; not while it is away."""
        if self._description is None and time.monotonic() >= self._ask_again:
            self._ask_again = time.monotonic() + AWAY_SECONDS
            with contextlib.suppress(RequestTimeout):
                await self.describe()
        return self._description is not None and self._description.aligning is not None

    async def words(self, samples: numpy.ndarray, rate: int, text: str, **options: Any) -> Sequence[WordTime]:
        """When the words of a text are said in a sound f32 [n]; none if this pipeline does not know that, or fails."""
        try:
            description = await self.describe()
            if description.aligning is None or len(samples) > rate * description.aligning.max_seconds:
                return ()
            stream = await self.client.submit(
                [{"role": "user", "content": [{"type": "audio", "audio": (samples, rate)}]}],
                modalities=["words"],
                additional_information={TRANSCRIPT: text},
                params={description.outputs.get("text", ""): StageParams(max_tokens=1)},  # the text is known
                **options,
            )
            found = [word async for item in stream if isinstance(item, WordTimes) for word in item.words]
        except OmniError as error:  # a sound is more than its times
            logger.warning("no times of words: %s", error)
            return ()
        seconds = len(samples) / rate
        return [WordTime(one.word, min(one.start, seconds), min(one.end, seconds), one.place) for one in found]

    async def _write_down(self, sound: Mapping[str, Any], about: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        answer = await self.client.generate(**to_write_down(sound, await self.describe(), **about), **options)
        return (about.get("begun", "") + answer.text).strip() or NOTHING


# What asks an omni model for the words of a recording
TRANSCRIBE = "Write down what is said in this recording, word for word, in the language that is spoken{language}."
TRANSLATE = "Translate what is said in this recording into English."
ONLY = " Answer with that text alone: no introduction, no comment, no quotation marks."
CONTEXT = "\n\nThis text comes before it, or shows how names and terms are spelt:\n<<<\n{prompt}\n>>>"


def to_write_down(
    sound: Mapping[str, Any],
    description: Description,
    language: str = "",
    prompt: str = "",
    begun: str = "",
    translates: bool = False,
) -> dict[str, Any]:
    """What `AsyncOmniClient.submit` takes to have a sound, a part of a message, written down by a pipeline.

    Args:
        language: of the sound, if it is known.
        prompt: what was said before, or how names are spelt.
        begun: how its text begins, which a model of hearing goes on with.
        translates: ask for the words in English, which a model of hearing cannot give.
    """
    request: dict[str, Any] = {
        "modalities": ["text"],
        "params": {description.outputs.get("text", ""): StageParams(temperature=0.0)},
    }
    if description.hearing is None:
        question = TRANSLATE if translates else TRANSCRIBE.format(language=f" ({language})" if language else "")
        question += ONLY + (CONTEXT.format(prompt=prompt) if prompt.strip() else "")
        return {**request, "prompt": [{"role": "user", "content": [sound, {"type": "text", "text": question}]}]}
    told = {"additional_information": {LANGUAGE: language}} if language else {}
    about = [{"role": "system", "content": prompt}] if prompt.strip() else []
    said = [{"role": "assistant", "content": begun}] if begun else []
    return {**request, **told, "prompt": [*about, {"role": "user", "content": [sound]}, *said]}


def _digest(sound: bytes | tuple[numpy.ndarray, int]) -> bytes:
    """A name for a file, or for samples with their rate."""
    data, rate = (sound, 0) if isinstance(sound, bytes) else (sound[0].tobytes(), sound[1])
    return hashlib.blake2b(data, digest_size=16, salt=rate.to_bytes(4, "little")).digest()
