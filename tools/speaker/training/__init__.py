"""Training of the four parts, each for a given time on one device; `loop` has what they share."""

from __future__ import annotations

from pathlib import Path

from tools.speaker.errors import SpeakerError
from tools.speaker.layout import PARTS, load_tokenizer, make_config
from tools.speaker.training.loop import Options


def train(part: str, options: Options) -> Path:
    """Trains a part; returns where its weights are. Raises SpeakerError for another name or if something is missing."""
    if part not in PARTS:
        raise SpeakerError(f"Unknown part {part!r}; there are {', '.join(PARTS)}.")
    import torch

    from tools.speaker.training.dit import train_dit
    from tools.speaker.training.talker import train_talker
    from tools.speaker.training.thinker import train_thinker
    from tools.speaker.training.vocoder import train_vocoder

    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    tokenizer = load_tokenizer(options.work / "model")
    config = make_config(tokenizer.convert_tokens_to_ids("user"))
    trainers = {"thinker": train_thinker, "talker": train_talker, "dit": train_dit, "vocoder": train_vocoder}
    return trainers[part](options, config)
