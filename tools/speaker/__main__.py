"""Command line: `python -m tools.speaker corpus|speak|own|prepare|train|judge|export|evaluate ...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tools.checkpoints import FolderError
from tools.checkpoints.measure import quiet_transformers
from tools.speaker import SpeakerError

STAGES = ("teacher", "codes", "chain", "tasks", "digits")


def add_corpus(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that makes the texts."""
    command = commands.add_parser("corpus", help="texts, tasks, tokenizer and configuration; needs WordNet")
    command.add_argument("work", type=Path, help="folder for everything that the training reads and writes")
    command.add_argument(
        "--tokenizer",
        type=Path,
        help="checkpoint whose tokenizer to take, to train its weights on (default: a new one)",
    )
    command.set_defaults(run=run_corpus)


def run_corpus(options: argparse.Namespace) -> None:
    """Writes the corpus."""
    from tools.speaker.corpus import write_corpus

    print(f"speaker: {write_corpus(options.work, options.tokenizer)} in {options.work}")


def add_speak(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that speaks the corpus."""
    command = commands.add_parser("speak", help="speak the corpus with the teacher; files that are there are kept")
    command.add_argument("work", type=Path, help="folder of the corpus")
    command.add_argument("--workers", type=int, help="processes (default: one for each core)")
    command.add_argument("--texts", type=int, help="only the first N texts, for a trial")
    command.add_argument("--kinds", default="heard,sounds,codes", help="some of heard, sounds and codes (default: all)")
    command.set_defaults(run=run_speak)


def run_speak(options: argparse.Namespace) -> None:
    """Speaks the corpus."""
    from tools.speaker.spoken import KINDS, speak_corpus

    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SpeakerError(f"--kinds: unknown kind {unknown[0]!r}; there are {', '.join(KINDS)}.")
    files = speak_corpus(options.work, options.workers, options.texts, kinds)
    print(f"speaker: {files} files in {options.work / 'spoken'}")


def add_own(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that lets the checkpoint speak to its own ear."""
    command = commands.add_parser(
        "own", help="speak lists with DiT and vocoder, so that the thinker learns to hear them"
    )
    command.add_argument("work", type=Path, help="folder of the corpus")
    command.add_argument("checkpoint", type=Path, help="checkpoint whose DiT and vocoder to take")
    command.add_argument("--device", default="cuda")
    command.add_argument("--lists", type=int, default=2000, help="of the 12,800 (default: 2000)")
    command.set_defaults(run=run_own)


def run_own(options: argparse.Namespace) -> None:
    """Speaks lists in the checkpoint's voices."""
    from tools.speaker.own import speak_own

    files = speak_own(options.work, options.checkpoint, options.device, options.lists)
    print(f"speaker: {files} files in {options.work / 'spoken'}")


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that writes what thinker and talker are trained on."""
    command = commands.add_parser("prepare", help="write token ids and held-out codes for thinker and talker; on a CPU")
    command.add_argument("work", type=Path, help="folder of the corpus")
    command.add_argument("--examples", type=int, help="for the thinker (default: 300,000), fewer for a trial")
    command.set_defaults(run=run_prepare)


def run_prepare(options: argparse.Namespace) -> None:
    """Prepares the training of thinker and talker."""
    from tools.speaker.training.prepare import EXAMPLES, write_held_out, write_texts

    texts = write_texts(options.work, options.examples or EXAMPLES)
    print(f"speaker: {texts} texts, {write_held_out(options.work)} to judge by, in {options.work / 'prepared'}")


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that trains a part."""
    command = commands.add_parser("train", help="train one part for some time; continues from WORK/state")
    command.add_argument("part", help="thinker, then talker; dit and vocoder at any time, also all at once")
    command.add_argument("work", type=Path, help="folder of the corpus, of what was spoken and prepared")
    command.add_argument("--seconds", type=float, required=True)
    command.add_argument("--device", default="cuda")
    command.add_argument("--from", dest="start", type=Path, help="weights to begin from: a checkpoint, or other parts")
    command.add_argument("--rate", type=float, help="peak of the learning rate (default: the part's own)")
    command.add_argument("--scale", type=float, default=1.0, help="of the batches (default: 1, for 80 GB)")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--no-graphs", dest="graphs", action="store_false", help="thinker and talker, if CUDA fails")
    command.set_defaults(run=run_train)


def run_train(options: argparse.Namespace) -> None:
    """Trains a part."""
    from tools.speaker.training import train
    from tools.speaker.training.loop import Options

    names = ("work", "seconds", "device", "start", "rate", "seed", "scale", "graphs")
    path = train(options.part, Options(**{name: getattr(options, name) for name in names}))
    print(f"speaker: wrote {path}")


def add_judge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that fits the judge of sound."""
    command = commands.add_parser("judge", help="fit the judge of tests and benchmarks to the teacher's speech")
    command.add_argument("work", type=Path, help="folder of the corpus")
    command.add_argument("--sentences", type=int, default=90)
    command.set_defaults(run=run_judge)


def run_judge(options: argparse.Namespace) -> None:
    """Fits the judge and writes it beside the code."""
    from tools.speaker.corpus import Corpus
    from tools.speaker.evaluate import held_out_sentences
    from tools.speaker.judge import DATA, HELD_OUT, Judge, write_held_out

    Judge.fit_to_teacher(Corpus.load(options.work).sentences[: options.sentences]).save()
    write_held_out(held_out_sentences(12))
    print(f"speaker: wrote {DATA} and {HELD_OUT}")


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that writes a checkpoint."""
    command = commands.add_parser("export", help="put the four parts together as a checkpoint")
    command.add_argument("parts", type=Path, help="folder with PART.safetensors, or another checkpoint")
    command.add_argument("out", type=Path)
    command.add_argument(
        "--tokenizer", type=Path, help="folder with the tokenizer of the training (default: PARTS, or model beside it)"
    )
    command.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> None:
    """Writes the checkpoint."""
    from tools.speaker.export import export

    beside = options.parts.parent / "model"
    tokenizer = options.tokenizer or (beside if (beside / "tokenizer.json").exists() else options.parts)
    size = export(options.parts, tokenizer, options.out)
    print(f"speaker: wrote {options.out}, {size / 1e6:.1f} MB")


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that judges a checkpoint."""
    command = commands.add_parser("evaluate", help="word and phone errors, stage by stage, both voices")
    command.add_argument("checkpoint", type=Path)
    stages = f"some of {', '.join(STAGES)}, and of the skills in skills.py (default: {', '.join(STAGES)})"
    command.add_argument("--stages", default=",".join(STAGES), help=stages)
    command.add_argument("--sentences", type=int, default=12, help="of the 30 held-out ones (default: 12)")
    command.add_argument("--tasks", type=int, default=8, help="of the 40 held-out ones (default: 8)")
    command.add_argument("--wavs", type=Path, help="folder for what was said")
    command.add_argument("--no-recogniser", action="store_true", help="phones and texts only")
    command.set_defaults(run=run_evaluate)


def run_evaluate(options: argparse.Namespace) -> None:
    """Prints the scores, and every answer with a mistake."""
    import soundfile

    from tools.speaker.evaluate import Spoken, evaluate
    from tools.speaker.recogniser import load_recogniser
    from tools.speaker.skills import SKILLS

    stages = options.stages.split(",")
    if unknown := [stage for stage in stages if stage not in (*STAGES, *SKILLS)]:
        raise SpeakerError(f"Unknown stage {unknown[0]!r}; there are {', '.join((*STAGES, *SKILLS))}.")

    def keep(stage: str, voice: str, number: int, said: Spoken) -> None:
        if options.wavs:
            options.wavs.mkdir(parents=True, exist_ok=True)
            soundfile.write(options.wavs / f"{stage}_{voice}_{number:02}.wav", said.wave, 24_000)

    recognise = None if options.no_recogniser else load_recogniser()
    for line in evaluate(options.checkpoint, stages, options.sentences, options.tasks, recognise, keep):
        print(line, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.speaker", description="Makes the checkpoint that speaks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_corpus, add_speak, add_own, add_prepare, add_train, add_judge, add_export, add_evaluate):
        add(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or 1 if the step cannot run."""
    options = make_parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if find_spec("transformers"):  # the training of thinker and talker does without
        quiet_transformers()
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except (SpeakerError, FolderError, OSError) as error:
        print(f"speaker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
