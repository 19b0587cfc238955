"""How Qwen-Image's prompts are written for its text encoder. Without torch or vLLM."""

from __future__ import annotations

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import Prompt

NEGATIVE_TOKENS = "negative_token_ids"  # name of the negative prompt's token ids, i64 [tokens]
PICTURE_TOKEN = "<|image_pad|>"
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def written(text: str, pictures: int) -> str:
    """The text of a prompt that refers to so many pictures, each with one placeholder. A space stands for no text."""
    shown = " ".join(
        f"<image{number}><|vision_start|>{PICTURE_TOKEN}<|vision_end|>" for number in range(1, pictures + 1)
    )
    return f"{SYSTEM}<|im_start|>user\n{shown}{text or ' '}<|im_end|>\n<|im_start|>assistant\n"


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


class PictureTemplate:
    """Renders prompts as the model was trained with them; pictures come first, whatever their place in the message."""

    def render(self, prompt: Prompt) -> str:
        """The text of a prompt. Raises `InvalidRequest` for one that this model does not take."""
        return written(text_of(prompt), len(prompt.media))
