"""Command line: `python -m tools.speaker new|train|evaluate ...`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from tools.checkpoints import FolderError
from tools.checkpoints.reference import quiet_transformers
from tools.speaker import SpeakerError
from tools.speaker.checkpoint import write_new
from tools.speaker.evaluate import SAID, STAGES, Speaker, ask, say
from tools.speaker.recogniser import load_recogniser
from tools.speaker.train import PARTS, train


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.speaker", description="Makes the checkpoint that speaks.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    new = commands.add_parser("new", help="write a checkpoint with new weights; needs the teacher")
    new.add_argument("folder", type=Path)
    trained = commands.add_parser("train", help="train a part of a checkpoint; needs the teacher and WordNet")
    trained.add_argument("part", choices=PARTS, help="in this order; the talker reads the thinker's states")
    trained.add_argument("folder", type=Path, help="checkpoint whose weights to train on")
    trained.add_argument("--steps", type=int, default=20_000, help="default: 20,000; the rate falls over all of them")
    trained.add_argument("--seconds", type=float, default=math.inf, help="end earlier (default: no limit)")
    trained.add_argument("--batch", type=int, help="examples of a step (default: the part's own)")
    trained.add_argument("--rate", type=float, help="peak of the learning rate (default: the part's own)")
    own = "lists that the checkpoint says, to learn to hear itself (default: 400); for the thinker"
    trained.add_argument("--own", type=int, default=400, help=own)
    trained.add_argument("--device", default="cpu")
    trained.add_argument("--workers", type=int, default=2, help="processes that make examples (default: 2)")
    trained.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="of Debian's wordnet-base")
    asked = commands.add_parser("evaluate", help="print what is wrong, and how much is right")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--stages", default=",".join(STAGES), help=f"default: all of {', '.join(STAGES)}")
    asked.add_argument("--sentences", type=int, default=12, help="of those that are said (default: 12)")
    asked.add_argument("--recogniser", action="store_true", help="count word errors, too: pip install -e '.[quality]'")
    return parser


def evaluate(options: argparse.Namespace) -> None:
    """Prints what is wrong in each stage, and how much is right."""
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        raise SpeakerError(f"Unknown stages {', '.join(unknown)}; there are {', '.join(STAGES)}.")
    recognise, speaker = load_recogniser() if options.recogniser else None, Speaker(options.folder)
    for stage in stages:
        lines = say(stage, speaker, options.sentences, recognise) if stage in SAID else ask(stage, speaker)
        for line in lines:
            print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or 1 if the step cannot run."""
    given = make_parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_transformers()
    try:
        if given.command == "new":
            write_new(given.folder)
        elif given.command == "evaluate":
            evaluate(given)
        else:
            train(given.part, given.folder, given)
    except (SpeakerError, FolderError, OSError) as error:
        print(f"speaker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
