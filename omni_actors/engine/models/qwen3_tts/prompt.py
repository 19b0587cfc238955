"""The prompt of the talker. Every position has a text; the later ones also have a code, or what stands in for one.

    i positions     instructions, as a turn of the user
    3               the tokens that open the assistant's turn
    3 to 5          tts_pad + think or nothink, think_bos, the language if one is named, think_eos, the voice if there
                    is one
    1               tts_bos + codec_pad

then, where the text is known at the start (voices of the checkpoint, voices that are described):

    t + 1           text and tts_eos + codec_pad
    1               tts_pad + codec_bos                         frame k: tts_pad

where it is read while it is spoken (the voice of a clip):

    1               text 0 + codec_bos                          frame k: text k + 1, then tts_eos, then tts_pad

where the clip is continued (T the clip's text, the text and tts_eos; C the clip's frames):

    1 + C           T, then tts_pad + codec_bos, C              frame k: what is left of T, then tts_pad
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

NO_CODE = -1


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """What the positions of a prompt are made of.

    Args:
        texts: the text id of each position.
        codes: the code of each of the last positions; `NO_CODE` where something stands in for one.
        voice_at: position of a clip's voice, if it has one; `clip_at`: of the clip's first frame.
        following: text ids of frame 0, 1 and so on; later ones get tts_pad.
    """

    texts: list[int]
    codes: list[int]
    voice_at: int
    clip_at: int
    following: list[int]


def lay_out(
    config: PretrainedConfig,
    *,
    opening: Sequence[int],
    text: Sequence[int],
    instructions: Sequence[int] = (),
    language: int | None = None,
    voice: int | None = None,
    clip_text: Sequence[int] = (),
    clip_frames: int = 0,
) -> PromptLayout:
    """Lay out the prompt of one request.

    Args:
        opening: the three tokens that open the assistant's turn.
        language: its code; `None` for the model to find out.
        voice: its code; `NO_CODE` for that of a clip, `None` for none.
        clip_frames: of the clip that is continued, whose text is `clip_text`; 0 to start afresh.
    """
    think, nothink, think_bos, think_eos = config.codec_think
    heard = [nothink, think_bos, think_eos] if language is None else [think, think_bos, language, think_eos]
    voice_at = len(instructions) + len(opening) + len(heard)
    heard += [voice] if voice is not None else []
    pad, eos = config.text_pad, config.text_eos
    texts = [*instructions, *opening, *[pad] * len(heard), config.text_bos]
    codes = [*heard, config.codec_pad]
    clip_at = len(texts) + 1
    if clip_frames:
        spoken = [*clip_text, *text, eos]
        length = 1 + clip_frames
        texts += [*spoken[:length], *[pad] * (length - len(spoken))]
        codes += [config.codec_bos, *[NO_CODE] * clip_frames]
        following = spoken[length:]
    elif voice == NO_CODE:
        texts.append(text[0])
        codes.append(config.codec_bos)
        following = [*text[1:], eos]
    else:
        texts += [*text, eos, pad]
        codes += [*[config.codec_pad] * (len(text) + 1), config.codec_bos]
        following = []
    return PromptLayout(texts, codes, voice_at, clip_at, following)
