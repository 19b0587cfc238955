"""Makes the checkpoint that speaks, `examples/speaker/`: a Qwen2.5-Omni of 9.0 million weights that flite has taught.

    tools/speaker/flite/build.sh                 the teacher: flite's two CMU voices as one program
    python -m tools.speaker new DIR              the layout of examples/speaker, with new weights
    python -m tools.speaker train PART DIR       trains dit, vocoder, thinker, talker, in this order
    python -m tools.speaker evaluate DIR         what is answered, heard, seen and said

The teacher gives phones, durations and pitch, from which `codec` makes 50 codes a second. The talker learns these
codes, the DiT and BigVGAN the sound of them. All examples are made while a part is trained, by transformers' processor
from `texts` and by the teacher, so nothing is stored but the checkpoint. omni_actors imports nothing of this.
"""

from __future__ import annotations


class SpeakerError(Exception):
    """A step cannot run: something is missing or does not fit; the message says what to do."""
