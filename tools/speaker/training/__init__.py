"""Training of the four parts, each for a given time on one device.

`prepare` writes what thinker and talker read; these are trained by `learner` on data that lies on the
device, and need neither transformers nor the corpus. DiT and vocoder are trained by `loop` on transformers' modules.
"""

from __future__ import annotations

from pathlib import Path

from tools.speaker import SpeakerError
from tools.speaker.layout import PARTS, load_tokenizer, speaker_config
from tools.speaker.training.loop import Options


def train(part: str, options: Options) -> Path:
    """Trains a part; returns where its weights are. Raises SpeakerError for another name or if something is missing."""
    if part not in PARTS:
        raise SpeakerError(f"Unknown part {part!r}; there are {', '.join(PARTS)}.")
    import torch

    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return _train_decoder(part, options) if part in ("thinker", "talker") else _train_sound(part, options)


def _train_decoder(part: str, options: Options) -> Path:
    import torch

    from tools.speaker.training.talker import train_talker
    from tools.speaker.training.thinker import train_thinker

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return (train_thinker if part == "thinker" else train_talker)(options)
    except RuntimeError as error:
        if options.device == "cpu" or not options.graphs:
            raise
        raise SpeakerError(
            f"The {part}'s training ended: {str(error)[:300]} Run the command again with --no-graphs, or with"
            " --scale 0.5 if memory is short; it continues from the last save."
        ) from error


def _train_sound(part: str, options: Options) -> Path:
    from tools.speaker.training.dit import train_dit
    from tools.speaker.training.vocoder import train_vocoder

    tokenizer = load_tokenizer(options.work / "model")
    config = speaker_config(tokenizer.convert_tokens_to_ids("user"))
    return (train_dit if part == "dit" else train_vocoder)(options, config)
