"""Puts a stage's instruction into the prompts that it prepares."""

from __future__ import annotations

import msgspec

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import ContentPart, Prompt


def instructed(prompt: Prompt, instruction: str) -> Prompt:
    """The prompt with `instruction` before the content of its only message; itself if the instruction is empty.

    Raises:
        InvalidRequest: it is not one message of the user. Models further on get only what this one writes, so that
            earlier messages and those of the system would be lost on them.
    """
    if not instruction:
        return prompt
    if len(prompt.messages) != 1 or prompt.messages[0].role != "user":
        raise InvalidRequest(
            "messages: this pipeline takes one message of the user at a time, without earlier ones and without a "
            "system message.",
            hint="Its operator has set an instruction in the YAML. Send the last message alone.",
            field="messages",
        )
    (message,) = prompt.messages
    first, *rest = message.content
    if first.text is None:
        content = (ContentPart(text=instruction), *message.content)
    else:
        content = (ContentPart(text=instruction + first.text), *rest)
    return msgspec.structs.replace(prompt, messages=(msgspec.structs.replace(message, content=content),))
