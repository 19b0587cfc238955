"""Runs one stage of a checkpoint in this process, without a pipeline: speaks codec tokens with the vocoder.

python -m tools.checkpoints tiny checkpoints/tiny_qwen2_5_omni
python examples/one_stage.py checkpoints/tiny_qwen2_5_omni --voice Ethan --answer sound.wav
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

# --8<-- [start:stage]
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.stage_llm import StageLLM


def speak(checkpoint: str, utterances: list[list[int]], voice: str | None) -> list:
    """Turn lists of codec tokens into sound. The last utterance is the most urgent one."""
    model = OmniModelConfig(checkpoint, "code2wav", decode={"policy": "whole"})
    with StageLLM(OmniEngineArgs(model, "diffusion", {"max_num_seqs": 4})) as vocoder:
        return vocoder.generate(
            [{"prompt_token_ids": tokens} for tokens in utterances],
            {"num_steps": 10},
            voice=voice,
            seed=7,
            priority=list(range(len(utterances), 0, -1)),
        )


# --8<-- [end:stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=50, help="codec tokens to speak; 50 are a second of sound")
    parser.add_argument("--voice", help="one of the checkpoint's voices")
    parser.add_argument("--answer", type=Path, default=Path("sound.wav"))
    options = parser.parse_args()

    tokens = [index * 31 % 256 for index in range(options.tokens)]
    (output,) = speak(options.checkpoint, [tokens], options.voice)
    if output.error is not None:
        raise SystemExit(str(output.error))
    soundfile.write(options.answer, output.audio, output.sample_rate)
    usage = output.usage["code2wav"]
    print(f"{len(output.audio) / output.sample_rate:g} s of sound in {options.answer}: {usage.output_tokens} steps")


if __name__ == "__main__":
    main()
