"""Makes the checkpoint that speaks, `examples/speaker/`: a Qwen2.5-Omni of 9.0 million weights that flite has taught.

    tools/speaker/flite/build.sh                        the teacher: flite's two CMU voices as one program
    python -m tools.speaker corpus WORK                 texts and tasks, tokenizer, configuration
    python -m tools.speaker speak WORK                  speaks them: waves, codes, phones
    python -m tools.speaker prepare WORK                token ids for the training of thinker and talker
    python -m tools.speaker train PART WORK             thinker, talker, dit, vocoder; each continues where it stopped
    python -m tools.speaker judge WORK                  which phone a sound is, for tests and benchmarks
    python -m tools.speaker export WORK/parts OUT       the checkpoint, in the published layout
    python -m tools.speaker evaluate OUT                word and phone errors, stage by stage

The teacher gives phones, durations and pitch, from which `codec` makes 50 codes a second. The talker learns these
codes, the DiT and BigVGAN the sound of them. Training is plain torch on one GPU. omni_actors imports nothing of this.
"""

from __future__ import annotations

from pathlib import Path


class SpeakerError(Exception):
    """A step cannot run: something is missing or does not fit; the message says what to do."""


def files_of(work: Path, kind: str, *, needed: bool = True) -> list[Path]:
    """Returns the files of one kind in order. Raises SpeakerError if there are none that are needed."""
    found = sorted((work / "spoken").glob(f"{kind}_*.npz"))
    if needed and not found:
        raise SpeakerError(f"{work} holds no {kind}; run python -m tools.speaker speak {work}.")
    return found
