"""Judges turn detection: turns that are missed, made up, cut short or found late, in recordings whose turns are known.

    apt-get install espeak-ng flite
    python benchmarks/turn_detection.py [--smart-turn smart-turn-v3.2-cpu.onnx]

Voices of espeak-ng and flite speak with a pause of a known length in each turn, beside noise, other voices, music and
clicks; five seconds for an answer follow each turn. The server's own detector hears all of it, in pieces of 40 ms.
`--smart-turn` also judges an end-of-turn model that is asked at each short silence.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import soundfile
import soxr
import workload
from numpy.random import Generator
from numpy.typing import NDArray

from omni_actors.http_server.realtime import turns as detection
from omni_actors.http_server.realtime.config import ServerVad
from omni_actors.http_server.realtime.formats import RATE

Sound = NDArray[numpy.float32]
Spans = list[tuple[int, int]]  # from one sample to another, at `RATE`

LEVEL = 0.05  # RMS of speech
QUIET = numpy.zeros(30 * RATE, numpy.float32)
BEFORE, AFTER = QUIET[: 2 * RATE], QUIET[: 5 * RATE]  # the first turn, and each
LATE = 200  # milliseconds beyond the silence that ends a turn
ASK, WAIT = 200, 4000  # milliseconds of silence at which the end-of-turn model is asked, and at which any turn ends

VOICES = [f"espeak-ng -v {name} -w {{}}" for name in ("en-us", "en-gb+f3", "en-gb-scotland+m3")]
VOICES += [f"flite -voice {name} -o {{}} -t" for name in ("slt", "rms", "awb")]
# What is said before and after a pause: at a filler, within a phrase, between clauses.
SENTENCES = [
    ("I would like to book a table for, um,", "four people on Friday evening."),
    ("Can you tell me when the", "next train to London leaves?"),
    ("If it rains on Sunday,", "we will stay at home and play cards."),
    ("What I need is, uh,", "a hotel that is close to the station."),
    ("My brother lives in", "a small village north of Madrid."),
    ("Please turn off the light,", "and then close the window."),
]


class Recording(NamedTuple):
    """Sound, and where its turns are."""

    condition: str
    sound: Sound
    turns: Spans


def scaled(sound: Sound, level: float) -> Sound:
    """Sound of an RMS."""
    return sound * (level / numpy.sqrt(numpy.mean(numpy.square(sound))))


@functools.cache
def speech(voice: str, text: str) -> Sound:
    """A text from its first audible sample to its last one."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/speech.wav"
        subprocess.run([*voice.format(path).split(), text], check=True, capture_output=True, timeout=60)
        samples, rate = soundfile.read(path, dtype="float32")
    sound = soxr.resample(samples, rate, RATE)
    heard = numpy.flatnonzero(abs(sound) > 0.02 * abs(sound).max())
    return scaled(sound[heard[0] : heard[-1] + 1], LEVEL)


def conversation(index: int, pause_ms: int = 300) -> tuple[Sound, Spans]:
    """Three turns of one voice with a pause in each, and time for the answers."""
    voice = VOICES[index % len(VOICES)]
    sound, turns = BEFORE, []
    for before, after in islice(cycle(SENTENCES), 3 * index, 3 * index + 3):
        turn = numpy.concatenate([speech(voice, before), QUIET[: pause_ms * RATE // 1000], speech(voice, after)])
        turns.append((len(sound), len(sound) + len(turn)))
        sound = numpy.concatenate([sound, turn, AFTER])
    return sound, turns


def white(samples: int, rng: Generator) -> Sound:
    """Noise with as much of each frequency."""
    return rng.standard_normal(samples, numpy.float32)


def pink(samples: int, rng: Generator) -> Sound:
    """Noise with as much in each octave, from 20 Hz on."""
    scale = numpy.sqrt(numpy.maximum(numpy.fft.rfftfreq(samples, 1 / RATE), 20))
    return numpy.fft.irfft(numpy.fft.rfft(white(samples, rng)) / scale, samples).astype(numpy.float32)


def babble(samples: int, rng: Generator) -> Sound:
    """Twelve people who talk at once."""
    total = numpy.zeros(samples, numpy.float32)
    for voice in 2 * VOICES:
        talk = numpy.concatenate([speech(voice, text) for pair in rng.permutation(SENTENCES) for text in pair])
        total += numpy.resize(numpy.roll(talk, rng.integers(len(talk))), samples)
    return total


def music(samples: int, rng: Generator) -> Sound:
    """Chords, a melody and a drum, 120 beats a minute."""
    seconds = numpy.arange(RATE // 2) / RATE
    drum = numpy.exp(-60 * seconds) * rng.standard_normal(len(seconds))

    def note(key: int) -> Any:
        overtones = (numpy.sin(2 * numpy.pi * 220 * 2 ** (key / 12) * n * seconds) / n for n in range(1, 6))
        return sum(overtones) * numpy.exp(-4 * seconds)

    beats = []
    for root in islice(cycle((0, 9, 5, 7)), samples // (2 * RATE) + 1):
        chord = note(root) + note(root + 4) + note(root + 7) + 2 * drum
        beats += [chord + note(12 + root + rng.choice((0, 2, 4, 7, 9))) for _ in range(4)]
    return numpy.concatenate(beats)[:samples].astype(numpy.float32)


def clicks(samples: int, rng: Generator) -> Sound:
    """A click or knock of 3 to 30 ms each second, up to four times as loud as speech."""
    sound = numpy.zeros(samples, numpy.float32)
    for second in range(0, samples - RATE, RATE):
        length = int(rng.uniform(0.003, 0.03) * RATE)
        start = second + rng.integers(RATE // 2)
        sound[start : start + length] = numpy.exp(-5 * numpy.arange(length) / length) * rng.standard_normal(length)
        sound[start : start + length] *= LEVEL * rng.uniform(0.5, 4)
    return sound


def recordings() -> Iterator[Recording]:
    """All of them; the same ones in each run."""
    rng = numpy.random.default_rng(33)
    for pause, index in product((200, 300, 500, 700), range(len(VOICES))):
        yield Recording(f"pause of {pause} ms", *conversation(index, pause))

    def beside(noise: Callable[[int, Generator], Sound], decibels: int, sound: Sound) -> Sound:
        return sound + scaled(noise(len(sound), rng), LEVEL * 10 ** (-decibels / 20))

    noises = list(product((white, pink, babble, music), (20, 10)))
    for (noise, decibels), index in product(noises, (0, 2, 4)):
        sound, turns = conversation(index)
        yield Recording(f"{noise.__name__}, {decibels} dB", beside(noise, decibels, sound), turns)
    for index in (1, 3, 5):
        sound, turns = conversation(index)
        yield Recording("clicks", sound + clicks(len(sound), rng), turns)
    yield Recording("nobody speaks", QUIET, [])
    yield Recording("nobody speaks", clicks(len(QUIET), rng), [])
    for noise, decibels in noises:
        yield Recording("babble alone" if noise is babble else "nobody speaks", beside(noise, decibels, QUIET), [])


def listen(sounds: Sequence[Sound]) -> list[list[detection.SpeechWindow]]:
    """The model's windows of each, as of sessions that send at the same time."""
    model, activities = detection.SpeechModel(), [detection.VoiceActivity(0, lambda *_: None) for _ in sounds]
    pcm = [(numpy.clip(sound, -1, 1) * 32767).astype("<i2").tobytes() for sound in sounds]
    windows: list[list[detection.SpeechWindow]] = [[] for _ in sounds]
    for start in range(0, max(map(len, pcm)), size := 2 * RATE // 25):
        pieces = [(one, data[start : start + size]) for one, data in zip(activities, pcm, strict=True)]
        for found, new in zip(windows, model.listen(pieces), strict=True):
            found += new
    return windows


def turns_of(windows: Sequence[detection.SpeechWindow], silence_ms: int) -> Spans:
    """Where the detector finds turns; one that has not ended ends with the sound."""
    detector = detection.TurnDetector(ServerVad(silence_duration_ms=silence_ms, prefix_padding_ms=0))
    found: Spans = []
    for window in windows:
        event = detector.feed(window)
        if isinstance(event, detection.TurnBegins):
            found.append((event.start, windows[-1].end))
        elif isinstance(event, detection.TurnEnds):
            found[-1] = (found[-1][0], event.end)
    return found


def smart_turn(path: Path) -> Callable[[Sound], bool]:
    """An end-of-turn model (docs/decisions.md): whether a speaker has finished."""
    import onnxruntime
    from transformers import WhisperFeatureExtractor

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    extractor, rate = WhisperFeatureExtractor(chunk_length=8), detection.MODEL_RATE

    def finished(turn: Sound) -> bool:
        sound = soxr.resample(turn, RATE, rate)[-8 * rate :]
        sound = numpy.pad(sound, (8 * rate - len(sound), 0))
        features = extractor(sound, sampling_rate=rate, return_tensors="np", do_normalize=True)
        return bool(session.run(None, {"input_features": features["input_features"]})[0].item() > 0.5)

    return finished


def joined(spans: Spans, sound: Sound, finished: Callable[[Sound], bool]) -> Spans:
    """The turns, of what ends with `ASK`: one that is not finished goes on, or ends with `WAIT`."""
    found: Spans = []
    for begin, end in spans:
        if found and begin < found[-1][1]:
            begin = found.pop()[0]
        wait = 0 if finished(sound[max(begin - RATE // 2, 0) : end]) else WAIT - ASK
        found.append((begin, end + wait * RATE // 1000))
    return found


def judge(recordings: Sequence[Recording], found: Sequence[Spans], silence_ms: int) -> tuple[str, str]:
    """Turns that are missed, false, cut in and late; p50 and p95 of the milliseconds after which an end is found."""
    missed = false = cut = 0
    delays: list[int] = []
    for recording, spans in zip(recordings, found, strict=True):
        for start, end in recording.turns:
            ends = [last for first, last in spans if first < end and last > start]
            missed += not ends
            cut += any(last < end for last in ends)
            delays += [detection.milliseconds(last - end) for last in ends[-1:] if last >= end]
        false += sum(all(last < start or first > end for start, end in recording.turns) for first, last in spans)
    shown = "{:.0f} / {:.0f}".format(*numpy.percentile(delays, (50, 95))) if delays else "-"
    return f"{missed} / {false} / {cut} / {sum(delay > silence_ms + LATE for delay in delays)}", shown


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smart-turn", type=Path, help="the model's file, as pipecat-ai brings it")
    options = parser.parse_args()
    made = list(recordings())
    windows = listen([recording.sound for recording in made])
    ways = {f"silence of {ms} ms": (ms, [turns_of(heard, ms) for heard in windows]) for ms in (500, 300, 800)}
    if options.smart_turn:
        finished, short = smart_turn(options.smart_turn), [turns_of(heard, ASK) for heard in windows]
        began = time.process_time()
        ways["Smart Turn"] = 500, [joined(found, one.sound, finished) for found, one in zip(short, made, strict=True)]
        print(f"{sum(map(len, short))} questions, {time.process_time() - began:.1f} s of CPU\n")
    rows = []
    for condition in [*dict.fromkeys(recording.condition for recording in made), "all"]:
        chosen = [index for index, recording in enumerate(made) if condition in (recording.condition, "all")]
        of = [made[index] for index in chosen]
        row = {"recordings": condition, "": len(of), "turns": sum(len(recording.turns) for recording in of)}
        for way, (ms, found) in ways.items():
            row[way], row[f"{way}: end"] = judge(of, [found[index] for index in chosen], ms)
        rows.append(row)
    print(workload.table(rows))


if __name__ == "__main__":
    main()
