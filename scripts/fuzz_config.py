"""Loads and checks mutated pipelines: each is accepted, or refused with a `ConfigError`, soon and within little memory.

    python scripts/fuzz_config.py [--seconds 60] [--seed 0] [--most 2] [--engines]

Changes the files in stage_configs/ at random, byte by byte, word by word and value by value, or writes what is hostile
as a whole, and runs `omni-actors check` on each in this process, with flags of a launch. --engines also checks vLLM's
arguments, after an import of ten seconds. Ends with 1 at the first violation, and keeps the input.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors import config, launch
from omni_actors.config import PipelineConfig, describe
from omni_actors.errors import ConfigError
from omni_actors.host.processes import EXIT_USAGE
from omni_actors.launcher.preflight import check_launch
from scripts.reference_docs import structs

MOST_BYTES = 200 << 20  # for one input
ADDRESS_SPACE = 8 << 30  # beyond what is used at the start: a bomb must end in a MemoryError, not the machine
HANG_SECONDS = 60  # by the clock

# Word lists are split texts, as a list with a line for each word would take a page.
NUMBERS = "0 -1 1 .nan -.inf 1e999 1e-400 1_0 0o7 3.0 1.5 010 1:30:00 2026-11-22 true".split()  # noqa: SIM905
NUMBERS += ["1" + "0" * 30, "9" * 6000, "0x" + "f" * 40, *(str(2**power) for power in (31, 63, 64)), str(-(2**63))]
TEXTS = ['"\\0"', '"a\\u0000b"', '"\\ud800"', '"\\x1b[2J"', "~", "''", "off", "no", "a" * 5000, "ü€😀", '"two\\nlines"']
PATHS = ["/dev/zero", "/proc/self/mem", "/dev/stdin", "/", "..", "../" * 2000, "~no-such-user", "x" * 300, "a/b/c", "."]
ADDRESSES = "tcp://0.0.0.0:1 tcp://*:* tcp://[::1]:0 ipc://x http://h:99999999 tcp://h:-1 inproc:// 127.0.0.1:0".split()  # noqa: SIM905
CLASSES = "os.system omni_actors omni_actors..x . .. omni_actors.errors.ConfigError builtins.eval".split()  # noqa: SIM905
YAML = "&a *a *b !!set !!python/object:os.system !x --- ... ? | >- { } [ ] , # @ ` ' \"".split()  # noqa: SIM905
YAML += ["<<: *a", "<<: 1", "%YAML 1.1", ": ", "- ", "\t", "\n", "\r", "\x85", "\u2028", "\ufeff"]
WORDS = (NUMBERS, TEXTS, PATHS, ADDRESSES, CLASSES, YAML)
BYTES = b"\0 \xff \xef\xbb\xbf \xc3 \xed\xa0\x80 \x7f \x1b : - &a *a".split(b" ")
PIECES = ["[", "{", "- ", "? ", "&a ", "*a ", "a: ", "'", '"', "|\n", "%TAG !a! b\n", "---\n", "!!a ", "x,", "\n "]
FLAGS = """
    --timeout --seed --voice --modalities --audio --image --save-audio --save-image --prompt --run-dir
    --keys --model --mps
    --startup-timeout --listen --metrics --nnodes --node-rank --master-addr --master-port --node-addr --http
    --http-body-bytes --http-audio-seconds --http-certificate --http-key --media-host --served-name
""".split()  # noqa: SIM905
DUMPER = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
SEEDS = sorted((Path(__file__).resolve().parents[1] / "stage_configs").glob("*.yaml"))


def dotted_keys() -> list[str]:
    """All keys of the schema, with the stage called `thinker`."""
    return [
        f"{path}.{key}".lstrip(".").replace("NAME", "thinker")
        for path, struct in structs(PipelineConfig)
        for key in struct.__struct_encode_fields__
    ]


class Mutator:
    """Makes pipelines and command lines, repeatable by seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        # Without a model, which would be missing, so that most of what is wrong could not be reached.
        self._seeds = [re.sub(r"(?m)^model: .*$", "model: echo", path.read_text()) for path in SEEDS]
        self._parsed = {text: yaml.safe_load(text) for text in self._seeds}
        self._keys = dotted_keys()

    def pipeline(self) -> tuple[str, bytes]:
        """What was done, and a file's content."""
        ways: list[Callable[[str], str | bytes]] = [self._bytes, self._words, self._values, self._values]
        way = self._chance.choice(ways) if self._chance.random() < 0.9 else self._hostile
        made = way(self._chance.choice(self._seeds))
        return way.__name__.strip("_"), made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass")

    def arguments(self) -> list[str]:
        """Flags and overrides, often none."""
        chance = self._chance
        arguments: list[str] = []
        for _ in range(chance.choice((0, 0, 0, 0, 0, 1, 1, 3))):
            if chance.random() < 0.5:
                arguments += ["--set", f"{self._key()}={self._word()}"]
            else:
                arguments.append(f"{chance.choice(FLAGS)}={self._word()}")
        return [argument.replace("\0", "") for argument in arguments]  # which no command line can hold

    def _word(self) -> str:
        return self._chance.choice(self._chance.choice(WORDS))

    def _key(self) -> str:
        chance = self._chance
        key = chance.choice(self._keys)
        odd = (f"{key}.x", "", ".", "a." * 200, "stages", "stages.x.kind")
        return key if chance.random() < 0.8 else chance.choice(odd)

    def _bytes(self, text: str) -> bytes:
        chance, data = self._chance, bytearray(text.encode())
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            at = chance.randrange(len(data) + 1)
            what = chance.randrange(5)
            if what == 0:
                data[at:at] = chance.choice(BYTES)
            elif what == 1:
                del data[at : at + chance.choice((1, 1, 10, 100))]
            elif what == 2:
                data[at:at] = data[at : at + chance.choice((10, 100, 1000))]
            elif what == 3:
                data[at:at] = chance.randbytes(chance.choice((1, 4, 50)))
            elif at < len(data):
                data[at] ^= 1 << chance.randrange(8)
        return bytes(data)

    def _words(self, text: str) -> str:
        chance, words = self._chance, re.findall(r"\w+|[^\S\n]+|\n|[^\w\s]", text)
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = chance.randrange(len(words))
            what = chance.randrange(4)
            if what == 0:
                words.insert(at, self._word())
            elif what == 1:
                words[at] = chance.choice(words)
            else:
                words[at] = self._word()
        return "".join(words)

    def _values(self, text: str) -> str:
        """Set keys of the schema, known or at random, to values of any type."""
        chance, data = self._chance, copy.deepcopy(self._parsed[text])
        marks: dict[str, str] = {}
        for _ in range(chance.choice((1, 1, 2, 4))):
            *path, last = (chance.choice(self._keys) if chance.random() < 0.8 else self._key()).split(".")
            node: Any = data
            for step in path:
                below = node.get(step) if isinstance(node, dict) else None
                if step == "stages" and isinstance(below, list) and below:
                    node = chance.choice(below)
                elif step != "thinker" and isinstance(node, dict):
                    node = node[step] = below if isinstance(below, dict) else {}
            if isinstance(node, dict):
                mark = f"MARK{len(marks)}X"
                marks[mark], node[last] = self._value(0), mark
        made = yaml.dump(data, Dumper=DUMPER, sort_keys=False, width=1 << 20)
        for mark, value in marks.items():
            made = made.replace(mark, value)
        return made

    def _value(self, depth: int) -> str:
        chance = self._chance
        what = chance.randrange(8) if depth < 4 else 0
        if what == 6:
            return f"[{', '.join(self._value(depth + 1) for _ in range(chance.choice((0, 1, 3, 30))))}]"
        if what == 7:
            pairs = (
                f"{chance.choice(('a', 'name', 'from', '<<', '1', self._word()))}: {self._value(depth + 1)}"
                for _ in "abc"
            )
            return f"{{{', '.join(pairs)}}}"
        return self._word()

    def _hostile(self, text: str) -> str:
        chance = self._chance
        many = chance.choice((10, 100, 100, 1000, 1000, 10_000, 300_000))
        shapes: list[Callable[[], str]] = [
            lambda: self._bomb("[{}]"),
            lambda: self._bomb("{{<<: [{}]}}"),
            lambda: chance.choice(PIECES) * min(many, 250_000),
            lambda: "[" * many + "]" * many,
            lambda: "a" * many * 3,
            lambda: f"{text}\nplugins: [{'x,' * many}]",
            lambda: f"{text}\nplugins: &a [{{b: *a}}]",
            lambda: f"{text}\ncoordinator: {{run_dir: {'x' * many}}}",
            lambda: "\n".join(" " * number + "a:" for number in range(min(many, 1000))),
            lambda: "".join(f"k{number}: &k{number} 1\n" for number in range(min(many, 60_000))),
            lambda: "stages:\n" + "- {name: a, kind: echo}\n" * min(many, 10_000),
            lambda: f"name: '{'x' * many}'\nmodel: {'[' * 40}{']' * 40}\n",
            self._largest,
        ]
        return chance.choice(shapes)()

    def _bomb(self, form: str) -> str:
        """Aliases of aliases of aliases."""
        chance = self._chance
        wide, deep = chance.choice((2, 10, 1000)), chance.choice((3, 9, 30))
        names = [f"a{number}" for number in range(deep)]
        inner = ["x" * chance.choice((1, 10_000)), *(f"*{name}" for name in names)]
        return "\n".join(
            f"{name}: &{name} {form.format(','.join([item] * wide))}" for name, item in zip(names, inner, strict=False)
        )

    def _largest(self) -> str:
        """As many processes as the schema allows."""
        kind = self._chance.choice(("echo", "diffusion", "autoregressive"))
        lines = ["name: x", "model: echo", "stages:"]
        for number in range(64):
            inputs = f"inputs: {{from: s{number - 1}}}, " if number else ""
            outputs = "text" if number == 63 else ""
            lines.append(f"- {{name: s{number}, kind: {kind}, replicas: 1024, {inputs}outputs: [{outputs}]}}")
        return "\n".join(lines)


PARSER = launch.parser()


class Violation(Exception):
    """An input did what none may do."""


def check(path: Path, arguments: Sequence[str], devices: int, engines: bool) -> str:
    """Do what `omni-actors check` does; returns "accepted" or "refused"."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            options = PARSER.parse_args([str(path), "--check", *arguments])
        loaded = config.load(path, launch.overrides(options), devices)
        check_launch(loaded.pipeline, options)
        describe(loaded, devices)
        if engines:
            check_arguments(loaded.pipeline)
    except ConfigError as error:
        if not error.message or len(str(error)) > 100_000:
            raise Violation(f"an error of {len(str(error))} characters") from error
        return "refused"
    except SystemExit as ended:
        if ended.code != EXIT_USAGE:
            raise Violation(f"exit code {ended.code}") from ended
        return "refused"
    packed = msgspec.json.encode(loaded.pipeline)  # as the processes of the pipeline receive it
    if msgspec.json.encode(msgspec.json.decode(packed, type=PipelineConfig)) != packed:
        raise Violation("another pipeline after a round trip")
    return "accepted"


def check_arguments(pipeline: PipelineConfig) -> None:
    from omni_actors.engine.arguments import ENGINES, check_arguments

    check_arguments(pipeline, [stage for stage in pipeline.stages if stage.kind in ENGINES], with_checkpoint=False)


def one(path: Path, arguments: Sequence[str], devices: int, options: argparse.Namespace) -> str:
    """`check`, and what it cost. Raises `Violation`."""
    began, most = time.process_time(), peak()
    signal.alarm(HANG_SECONDS)
    try:
        outcome = check(path, arguments, devices, options.engines)
    except Violation:
        raise
    except Exception as error:
        raise Violation("".join(traceback.format_exception(error))) from error
    finally:
        signal.alarm(0)
    took, grown = time.process_time() - began, peak() - most
    if took > options.most:
        raise Violation(f"{took:.1f} s of the processor")
    if grown > MOST_BYTES:
        raise Violation(f"{grown >> 20} MiB")
    return outcome


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def hang(number: int, frame: object) -> None:
    raise Violation(f"not done after {HANG_SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=2.0, help="seconds of the processor for one input (default: 2)")
    parser.add_argument("--engines", action="store_true", help="also check vLLM's arguments")
    options = parser.parse_args()
    if options.engines:
        import omni_actors.engine.arguments  # noqa: F401 - torch warns when it is imported
    warnings.simplefilter("error")
    for name in [name for name in os.environ if name.startswith(("OMNI_ACTORS_", "OTEL_", "SLURM_"))]:
        del os.environ[name]
    mutator, chance = Mutator(options.seed), random.Random(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fy-") as folder:
        path = Path(folder) / "pipeline.yaml"
        for seed in SEEDS:  # which also loads what the first input would load
            path.write_text(re.sub(r"(?m)^( *model:) .*$", r"\1 echo", seed.read_text()))
            if one(path, ["--http", "127.0.0.1:0"], 2, options) != "accepted":  # one recipe is for two GPUs
                raise SystemExit(f"{seed} is refused")
        limit_memory()
        signal.signal(signal.SIGALRM, hang)
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            way, data = mutator.pipeline()
            arguments, devices = mutator.arguments(), chance.choice((0, 0, 1, 8))
            path.write_bytes(data)
            try:
                counts[f"{way} {one(path, arguments, devices, options)}"] += 1
                if os.listdir(folder) != [path.name]:
                    raise Violation(f"files were left: {os.listdir(folder)}")
            except Violation as violation:
                kept = Path(f"fuzz_config-{options.seed}-{counts.total()}.yaml").absolute()
                kept.write_bytes(data)
                print(f"{violation}\ninput: {kept} {arguments} with {devices} GPUs", file=sys.stderr)
                return 1
    print(f"{counts.total()} inputs: {', '.join(f'{count} {what}' for what, count in sorted(counts.items()))}")
    print(f"peak {peak() >> 20} MiB")
    return 0


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, hard))


if __name__ == "__main__":
    sys.exit(main())
