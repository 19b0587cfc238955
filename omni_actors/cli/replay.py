"""Runs a recorded stage again and compares its output: `omni-actors replay FILE`.

Reads what a stage received under `--record`, feeds it to the same stage in this process (with its engine, but without
sockets or other stages) and compares the outputs. For every request that had finished, the whole text, audio, tokens,
rows and pictures must be equal, however they are cut into messages.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from omni_actors import flags, logs
from omni_actors.config import PipelineConfig
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from omni_actors.protocol.codec import Decoder, Envelope, Frame
from omni_actors.protocol.common import Abort, Failed
from omni_actors.protocol.header import Body, Header
from omni_actors.protocol.results import (
    AudioChunk,
    FromStage,
    ImageChunk,
    LatentsChunk,
    StageDone,
    StageUsage,
    TextDelta,
)
from omni_actors.protocol.stage import Chunk, IntoStage, Resend
from omni_actors.stage.actor import StageActor
from omni_actors.stage.outgoing import Outgoing
from omni_actors.stage.process import build_engine, processor_class
from omni_actors.stage.recorder import INBOUND, RecordingHeader, read

VERSION = "Replay it with the version of omni_actors that recorded it."


@dataclass
class Output:
    """All output of a stage for one request and one receiver, joined."""

    text: str = ""
    token_ids: bytes = b""
    buffers: dict[str, bytearray] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)
    final: bool = False
    end: object = None

    def add(self, body: Body, buffers: Sequence[Frame]) -> None:
        """Add a message. Times are left out, as they differ from run to run."""
        if isinstance(body, TextDelta):
            self.text += body.text
            self.token_ids += body.token_ids
        elif isinstance(body, AudioChunk):
            self._append("samples", buffers[body.samples.buffer])
            self.scalars["sample_rate"] = body.sample_rate
        elif isinstance(body, ImageChunk):
            self._append("previews" if body.preview else "pixels", buffers[body.pixels.buffer])
        elif isinstance(body, LatentsChunk):
            self._append("latents", buffers[body.latents.buffer])
        elif isinstance(body, Chunk):
            self.token_ids += body.token_ids
            for name, ref in body.tensors.items():
                self._append(name, buffers[ref.buffer])
            if body.rows is not None:
                self._append("rows", buffers[body.rows.tensor.buffer])
            for name, entry in body.information.entries.items() if body.information is not None else ():
                if entry.tensor is not None:
                    self._append(name, buffers[entry.tensor.buffer])
                else:
                    self.scalars[name] = entry.scalar if entry.list is None else list(entry.list)
            self.final |= body.final
        elif isinstance(body, StageDone):
            usage: StageUsage = body.usage
            self.end = (usage.finish_reason, usage.input_tokens, usage.output_tokens)
        elif isinstance(body, Failed):
            self.end = (body.code, body.message)

    def _append(self, name: str, data: Frame) -> None:
        self.buffers.setdefault(name, bytearray()).extend(data)

    def difference(self, other: Output) -> str:
        """Describe the first difference; "" if there is none."""
        for name in ("end", "text", "token_ids", "scalars", "final"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {str(mine)[:80]!r} then, {str(theirs)[:80]!r} now"
        for name in sorted({*self.buffers, *other.buffers}):
            then, now = self.buffers.get(name, bytearray()), other.buffers.get(name, bytearray())
            if then != now:
                same = bisect.bisect_left(range(min(len(then), len(now))), True, key=lambda n: then[:n] != now[:n])
                return f"{name}: {len(then)} bytes then, {len(now)} now, the same up to byte {max(0, same - 1)}"
        return ""


Outputs = dict[tuple[str, str], Output]  # by request and receiving stage ("" for the coordinator)


@dataclass
class Comparison:
    """The result of a replay."""

    finished: int  # requests that had finished, or failed, in the recording
    differences: list[str]


def replay(path: Path, pipeline: PipelineConfig | None = None) -> Comparison:
    """Replay a recording, optionally with another configuration of the pipeline.

    Raises:
        OmniError: the file is not a recording, or the stage does not start.
    """
    origin, entries = read(path)
    try:
        pipeline = pipeline or msgspec.json.decode(origin.pipeline_json, type=PipelineConfig)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path} has a configuration of another schema: {error}.", hint=VERSION) from error
    inbound: Decoder[IntoStage] = Decoder(IntoStage, pipeline.limits)
    outbound: Decoder[Chunk | FromStage] = Decoder(Chunk | FromStage, pipeline.limits)
    taken: list[Envelope[IntoStage]] = []
    then: Outputs = {}
    for entry in entries:
        if entry.direction == INBOUND:
            envelope = inbound.decode(entry.frames)
            # A request that met its deadline then must not miss it now.
            header = msgspec.structs.replace(envelope.header, deadline=0.0)
            taken.append(msgspec.structs.replace(envelope, header=header))
        else:
            sent = outbound.decode(entry.frames)
            _add(then, sent.header, entry.direction, sent.body, sent.buffers)
    ended = {request for (request, receiver), output in then.items() if not receiver and output.end is not None}
    # Output that a stage sent a second time, because the receiver restarted, is not compared.
    ended -= {item.header.request_id for item in taken if isinstance(item.body, Resend)}
    # Steps take no time here: an abort that came after the end must not come before it now.
    taken = [item for item in taken if not (isinstance(item.body, Abort) and item.header.request_id in ended)]
    now = _run(origin, pipeline, taken)
    differences = []
    for request in sorted(ended):
        for key in sorted({key for key in (*then, *now) if key[0] == request}):
            difference = then.get(key, Output()).difference(now.get(key, Output()))
            if difference:
                differences.append(f"{request} -> {key[1] or 'coordinator'}: {difference}")
    return Comparison(len(ended), differences)


def _run(origin: RecordingHeader, pipeline: PipelineConfig, taken: Iterable[Envelope[IntoStage]]) -> Outputs:
    """Feed messages to the stage and collect its output. Its clock stands still."""
    config = pipeline.stage(origin.stage.stage)
    engine = build_engine(pipeline, config, lambda phase: None)
    outputs: Outputs = {}

    def collect(messages: Iterable[Outgoing]) -> None:
        for message in messages:
            receiver = message.destination.stage if message.destination is not None else ""
            _add(outputs, message.header, receiver, message.body, message.buffers)

    try:
        stage = StageActor(pipeline, config, origin.stage, engine, processor_class(config), lambda: 0.0)
        for envelope in taken:
            collect(stage.receive(envelope))
            collect(stage.step())
        while stage.runnable():
            collect(stage.step())
    finally:
        engine.shutdown()
    return outputs


def _add(outputs: Outputs, header: Header, receiver: str, body: Body, buffers: Sequence[Frame]) -> None:
    outputs.setdefault((header.request_id, receiver), Output()).add(body, buffers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if all is equal, 1 if not, 2 if the recording cannot be replayed."""
    options = parser().parse_args(arguments)
    logs.configure("replay")
    try:
        comparison = replay(options.file)
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_USAGE
    for difference in comparison.differences:
        print(difference)
    print(f"{comparison.finished} requests, {len(comparison.differences)} differences")
    return EXIT_FAILED if comparison.differences else EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    about = (__doc__ or "").splitlines()[0]
    parser = flags.CommandParser(prog="omni-actors replay", usage="omni-actors replay FILE", description=about)
    parser.add_argument("file", type=Path, help="a file that a stage wrote under --record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
