"""HiFT: mel frames to sound. A predicted pitch drives an oscillator; the network shapes its spectrum into speech.

`Hift` looks back only, but for a few frames at the front: the pitch waits for `pitch_ahead` frames, the network
for those of its first convolution and one more. A window of mel frames with enough of the past gives the samples of its
new frames exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.s3_vocoder.weights import Weights
from omni_actors.engine.rows import moved

SAMPLE_RATE = 24_000  # Hz
SAMPLES = 480  # of a mel frame
DILATIONS = (1, 3, 5)
SLOPE = 0.1  # of the activations
PEAK = 0.99
LOUDEST = 100.0  # of a spectrum's magnitudes
VOICED = 10.0  # Hz
AMPLITUDE, NOISE = 0.1, 0.003  # of the oscillator, and of what is added to voiced sound
NOISE_SECONDS = 10  # of the table of noise, which then begins again
UNIT_ROUNDING = 1e-9
Convolve = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _reach(conv: nn.Conv1d) -> int:
    """How many positions before one its output depends on."""
    return int(conv.kernel_size[0] - 1) * int(conv.dilation[0])


def causal(conv: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """As many positions as the inputs have; zeros stand for the past."""
    output: torch.Tensor = conv(F.pad(inputs, (_reach(cast("nn.Conv1d", conv)), 0)))
    return output


def centered(conv: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Likewise, of a convolution that looks to both sides alike."""
    around = _reach(cast("nn.Conv1d", conv)) // 2
    output: torch.Tensor = conv(F.pad(inputs, (around, around)))
    return output


class _Residual(nn.Module):
    """Pairs of convolutions with their activations, around which the input is added."""

    def __init__(self, weights: Weights, name: str, convolve: Convolve) -> None:
        super().__init__()
        self._convolve, self.snake = convolve, _snake
        first = [weights.conv(f"{name}.convs1.{index}", dilation=each) for index, each in enumerate(DILATIONS)]
        second = [weights.conv(f"{name}.convs2.{index}") for index in range(len(DILATIONS))]
        self.first, self.second = nn.ModuleList(first), nn.ModuleList(second)
        self.frequencies = nn.ParameterList(
            nn.Parameter(weights.take(f"{name}.activations{part}.{index}.alpha")[:, None], requires_grad=False)
            for index in range(len(DILATIONS))
            for part in (1, 2)
        )
        self.reach = sum(map(_reach, (*first, *second)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for index, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            hidden = self._convolve(first, self.snake(inputs, self.frequencies[2 * index]))
            inputs = inputs + self._convolve(second, self.snake(hidden, self.frequencies[2 * index + 1]))
        return inputs


def _snake(inputs: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    return inputs + (inputs * frequency).sin().square() / (frequency + UNIT_ROUNDING)


class Shaping(nn.Module):
    """Shapes the spectrum of an oscillator into speech, in float32.

    Args:
        convolve: `causal` or `centered`.

    Attributes:
        ahead: frames that the network needs behind a frame, if it is causal.
    """

    window: torch.Tensor  # f32 [samples], of the spectrum

    def __init__(self, weights: Weights, convolve: Convolve) -> None:
        super().__init__()
        self._convolve = convolve
        self.before, self.after = weights.conv("conv_pre"), weights.conv("conv_post")
        self.bins = self.after.out_channels // 2
        self.hop = (self.bins - 1) // 2
        self.frames = SAMPLES // self.hop  # of the spectrum, of a mel frame
        count = weights.count("ups.")
        # A convolution that narrows the source has a kernel of twice its stride, one that does not of 1.
        self.strides = [max(1, weights.shape(f"source_downs.{index}.weight")[2] // 2) for index in range(count)]
        self.rates = [left // right for left, right in itertools.pairwise([self.frames, *self.strides])]
        self.widening = nn.ModuleList(
            weights.conv(f"ups.{index}") if convolve is causal else weights.widening(f"ups.{index}", rate)
            for index, rate in enumerate(self.rates)
        )
        self.narrowing = nn.ModuleList(
            weights.conv(f"source_downs.{index}", stride=each) for index, each in enumerate(self.strides)
        )
        self.sources, self.shapes = (
            nn.ModuleList(_Residual(weights, f"{name}.{index}", convolve) for index in range(weights.count(f"{name}.")))
            for name in ("source_resblocks", "resblocks")
        )
        weights.done()
        self.ahead = _reach(self.before) + 1  # its own frames ahead, and one for the spectrum's windows
        self.register_buffer("window", torch.hann_window(2 * (self.bins - 1)), persistent=False)

    @property
    def behind(self) -> int:
        """Mel frames before a frame on which its samples may depend, if the network is causal."""
        spectrum = 2 * (self.bins - 1) / SAMPLES  # mel frames of one window
        reach, scale, kernels = 0.0, 1, len(self.shapes) // len(self.widening)
        shapes, sources = cast("list[_Residual]", list(self.shapes)), cast("list[_Residual]", list(self.sources))
        convs = cast("list[tuple[nn.Conv1d, nn.Conv1d]]", list(zip(self.widening, self.narrowing, strict=True)))
        for stage, (wide, narrow) in enumerate(convs):
            scale *= self.rates[stage]
            reach += _reach(wide) / scale
            source = spectrum + (_reach(narrow) + 1) / self.frames + sources[stage].reach / scale
            reach = max(reach, source) + max(each.reach for each in shapes[kernels * stage :][:kernels]) / scale
        return math.ceil(reach + (_reach(self.after) + 1) / self.frames + spectrum) + 2

    def forward(self, mel: torch.Tensor, source: torch.Tensor, frames: torch.Tensor | None = None) -> torch.Tensor:
        """Samples [batch, time] of a window.

        Args:
            mel: [batch, mels, frames].
            source: [batch, samples], of all of them.
            frames: i64 [1], how many come before those of padding, if the network is causal. Of the padding `mel` is
                zero, as it is after the end; what the source has there is not read.
        """
        size, looks_ahead = 2 * (self.bins - 1), self._convolve is causal
        if frames is not None:
            end = frames * SAMPLES - 1  # the last sample, around which the spectrum's windows see the others mirrored
            places = torch.arange(source.shape[1], device=source.device)
            source = source.index_select(1, (end - (places - end).abs()).clamp(min=0))
        spectrum = torch.stft(source, size, self.hop, size, self.window, return_complex=True)
        wave = torch.cat([spectrum.real, spectrum.imag], 1)
        hidden = self.before(F.pad(mel, (0, self.ahead - 1))) if looks_ahead else centered(self.before, mel)
        kernels = len(self.shapes) // len(self.widening)
        for stage, (wide, narrow) in enumerate(zip(self.widening, self.narrowing, strict=True)):
            hidden, stride = F.leaky_relu(hidden, SLOPE), self.strides[stage]
            hidden = causal(wide, hidden.repeat_interleave(self.rates[stage], 2)) if looks_ahead else wide(hidden)
            if stage == len(self.widening) - 1:
                hidden = F.pad(hidden, (1, 0), mode="reflect")
            narrowed = narrow(F.pad(wave, (stride - 1, 0) if looks_ahead else (stride // 2, stride // 2)))
            hidden = hidden + self.sources[stage](narrowed)
            shapes = self.shapes[kernels * stage : kernels * (stage + 1)]
            hidden = torch.stack([shape(hidden) for shape in shapes]).mean(0)
        magnitude, phase = self._convolve(self.after, F.leaky_relu(hidden)).split(self.bins, 1)
        shaped = torch.polar(magnitude.exp().clamp(max=LOUDEST), phase.sin())
        return self._sound(shaped, frames).clamp(-PEAK, PEAK)

    def compile_activations(self) -> None:
        """Have the kernels of the activations joined, for graphs: a request could wait for the compiler."""
        snake = torch.compile(_snake, dynamic=True)
        for residual in (*self.sources, *self.shapes):
            cast("_Residual", residual).snake = snake

    def _sound(self, spectrum: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        """Samples [batch, time] of a spectrum [batch, bins, time], as `torch.istft`, which waits for the device."""
        window, count = self.window[:, None], spectrum.shape[2]
        size = len(window)
        frames = torch.fft.irfft(spectrum, size, dim=1) * window
        weights = window.square().expand(1, -1, count)
        if ends is not None:  # the last window is around the end
            heard = torch.arange(count, device=window.device) <= ends * self.frames
            frames, weights = frames * heard, weights * heard
        length = size + self.hop * (count - 1)
        summed, weight = (F.fold(each, (1, length), (1, size), stride=(1, self.hop)) for each in (frames, weights))
        return (summed / weight)[:, 0, 0, size // 2 : length - size // 2]


def mixed(
    mix: nn.Module, sines: torch.Tensor, pitch: torch.Tensor, noise: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The oscillator's samples [batch, samples] of its harmonics [batch, samples, harmonics].

    Args:
        pitch: Hz [batch, frames].
        noise: [samples, harmonics], a table that begins again.
        positions: i64 [batch], frames of the utterance before these.
    """
    voiced = (pitch[..., None] > VOICED).float().repeat_interleave(SAMPLES, 1)
    loudness = voiced * NOISE + (1 - voiced) * AMPLITUDE / 3
    places = positions[:, None] * SAMPLES + torch.arange(sines.shape[1], device=pitch.device)
    waves: torch.Tensor = mix(sines * AMPLITUDE * voiced + loudness * noise[places.remainder(len(noise))])
    return waves.tanh().squeeze(-1)


class Hift(nn.Module):
    """Mel frames [batch, mels, frames] to samples, `SAMPLES` for each frame, in float32.

    Args:
        seed: of the noise that is added to the oscillator, one table for all utterances.

    Attributes:
        convolve: `causal` or `centered`.
        draw: of what numbers the noise is.
        pitch_dtype: in which the pitch is computed.
        pitch_ahead: mel frames after a frame that its pitch depends on.
        delay: frames that the sound waits for.
        behind: frames before a frame on which its samples may depend.
        least: tokens of a first chunk; fewer have no frame whose pitch is known.
    """

    convolve: ClassVar[Convolve] = causal
    draw: ClassVar[Callable[..., torch.Tensor]] = torch.rand
    pitch_dtype: ClassVar[torch.dtype] = torch.float64  # errors of the pitch add up in the phase of the oscillator
    least: ClassVar[int] = 2
    noise: torch.Tensor  # f32 [samples, harmonics]

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        pitch = [
            weights.conv(f"f0_predictor.condnet.{2 * index}", dtype=self.pitch_dtype)
            for index in range(weights.count("f0_predictor.condnet."))
        ]
        self.pitch, self.classify = nn.ModuleList(pitch), weights.linear("f0_predictor.classifier", self.pitch_dtype)
        self.mix = weights.linear("m_source.l_linear")
        self.shaping = Shaping(weights, type(self).convolve)
        self.pitch_ahead = _reach(pitch[0])
        self.delay, self.behind = self.pitch_ahead + self.shaping.ahead, self.shaping.behind
        generator = torch.Generator().manual_seed(seed)
        noise = type(self).draw(NOISE_SECONDS * SAMPLE_RATE, self.mix.in_features, generator=generator)
        self.register_buffer("noise", noise, persistent=False)
        self._graphs: CudaGraphs[HiftWindows, tuple[torch.Tensor, ...]] = CudaGraphs()

    @property
    def begun(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an utterance begins with: mel frames, samples of the oscillator, and its phase."""
        rows = self.noise.new_zeros
        return rows(self.shaping.before.in_channels, 0), rows(0), rows(self.mix.in_features, dtype=torch.float64)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], frames: Sequence[int]) -> None:
        """Have memory for so many windows with so many new frames, on CUDA with graphs."""
        graphs: CudaGraphs[HiftWindows, tuple[torch.Tensor, ...]] = CudaGraphs(cuda=self.noise.is_cuda)
        if self.noise.is_cuda:
            self.shaping.compile_activations()
        # Of the shortest, also as first chunks.
        lengths = {min(frames), *(self.delay + self.behind + each for each in frames)}
        for size in sorted(sizes, reverse=True):  # the largest first: the others use its memory
            for length in sorted(lengths, reverse=True):
                windows = HiftWindows(self, size, length)
                graphs.capture(windows, partial(self.compute, windows))
        self._graphs = graphs

    def pitches(self, mel: torch.Tensor) -> torch.Tensor:
        """Hz [batch, frames] of mel frames, after which there are none."""
        first, *others = self.pitch
        hidden = F.elu(first(F.pad(mel.double(), (0, self.pitch_ahead))))
        for conv in others:
            hidden = F.elu(causal(conv, hidden))
        pitches: torch.Tensor = self.classify(hidden.transpose(1, 2))
        return pitches.squeeze(-1).abs().float()

    def compute(self, windows: HiftWindows) -> tuple[torch.Tensor, ...]:
        """Samples [batch, samples] of windows, the oscillator's, and its phase after each frame, f64, in cycles."""
        pitch, known = self.pitches(windows.mel), windows.known
        harmonics = torch.arange(1, windows.phase.shape[1] + 1, device=pitch.device)
        steps = (pitch[..., None] * harmonics / SAMPLE_RATE).remainder(1)
        frames = torch.arange(pitch.shape[1], device=pitch.device)
        steps = steps.double().masked_fill((frames < known)[:, None], 0)
        cycles = steps.cumsum(1) * SAMPLES + windows.phase[:, None]
        sines = (cycles.remainder(1) * (2 * math.pi)).sin().float().repeat_interleave(SAMPLES, 1)
        new = mixed(self.mix, sines, pitch, self.noise, windows.places)
        source = torch.where((frames < known).repeat_interleave(SAMPLES), windows.source, new)
        return self.shaping(windows.mel, source, windows.frames), source, cycles

    def stream(
        self,
        mel: torch.Tensor,
        source: torch.Tensor,
        left: torch.Tensor,
        kept: int,
        received: Sequence[int],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Samples [batch, time] of the frames that have not sounded, and what is left: mel, source and phase.

        Args:
            mel: [batch, mels, frames], of which `kept` came with chunks before.
            source: [batch, samples], of those of them whose pitch was known.
            left: f64 [batch, harmonics], the phase of the oscillator after these, in cycles.
            received: frames of the utterances before this chunk.
        """
        count, _, frames = mel.shape
        fitting = (each for each in self._graphs.tensors if each.length >= frames and each.size >= count)
        captured = min(fitting, key=lambda each: (each.size, each.length), default=None)
        windows = HiftWindows(self, count, frames) if captured is None else captured
        windows.load(mel, source, left, [before - kept for before in received])
        results = self.compute(windows) if captured is None else self._graphs.replay(captured)
        sound, source, cycles = (each[:count] for each in results)
        known = frames if last else frames - self.pitch_ahead
        sounded, end = max(0, kept - self.delay), frames if last else max(0, frames - self.delay)
        keep = max(0, frames - self.delay - self.behind)
        return (
            sound[:, sounded * SAMPLES : end * SAMPLES].clone(),
            mel[..., keep:],
            source[:, keep * SAMPLES : known * SAMPLES],
            cycles[:, known - 1].remainder(1),
        )


class HiftWindows:
    """Windows of utterances: the inputs of `Hift.compute` in memory of their own.

    Attributes:
        mel, source, phase: see `Hift.stream`; zero, or of other windows, where there are none.
        known: i64 [1], frames of which the source is given.
        frames: i64 [1], frames of each.
        places: i64 [size], frames of the utterances before them.
    """

    def __init__(self, hift: Hift, size: int, length: int) -> None:
        self.size, self.length = size, length
        mel, source, phase = hift.begun
        self.mel, self.source = mel.new_zeros(size, len(mel), length), source.new_zeros(size, length * SAMPLES)
        self.phase = phase.new_zeros(size, len(phase))
        self._numbers = torch.zeros(2 + size, dtype=torch.int64, device=mel.device)
        self.known, self.frames, self.places = self._numbers.split([1, 1, size])

    def load(self, mel: torch.Tensor, source: torch.Tensor, phase: torch.Tensor, places: Sequence[int]) -> None:
        """Copy what `Hift.stream` gets."""
        count, _, frames = mel.shape
        self.mel[:count, :, :frames] = mel
        self.mel[:count, :, frames:] = 0
        self.source[:count, : source.shape[1]] = source
        self.phase[:count] = phase
        numbers = torch.tensor([source.shape[1] // SAMPLES, frames, *places])
        self._numbers[: len(numbers)] = moved(numbers, mel.device)


OVERLAP = 8  # mel frames


class OverlapHift(Hift):
    """The HiFT of CosyVoice 2, whose layers look to both sides: chunks overlap, and are faded into each other."""

    convolve, draw, pitch_dtype = centered, torch.randn, torch.float32
    least = OVERLAP // 2  # fewer have no frames to overlap
    fading: torch.Tensor  # f32 [2 OVERLAP SAMPLES], up and down

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__(weights, seed)
        self.delay = self.behind = OVERLAP
        fading = torch.hamming_window(2 * OVERLAP * SAMPLES, periodic=False)
        self.register_buffer("fading", fading, persistent=False)

    @property
    def begun(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an utterance begins with: mel frames, samples of the oscillator, and samples."""
        mel, source, _ = super().begun
        return mel, source, source

    def capture(self, sizes: Sequence[int], frames: Sequence[int]) -> None:
        """Nothing: where chunks are cut depends on the recording."""

    def source(self, mel: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The oscillator's samples [batch, samples].

        Args:
            positions: i64 [batch], frames of the utterance before these.
        """
        hidden = mel
        for conv in self.pitch:
            hidden = F.elu(centered(conv, hidden))
        pitch = self.classify(hidden.transpose(1, 2)).abs()
        harmonics = torch.arange(1, self.mix.in_features + 1, device=mel.device)
        # In float64: the phase adds up.
        cycles = (pitch.double() * harmonics / SAMPLE_RATE).remainder(1).cumsum(1) * SAMPLES
        cycles = F.interpolate(cycles.transpose(1, 2), scale_factor=SAMPLES, mode="linear").transpose(1, 2)
        sines = (cycles.remainder(1) * (2 * math.pi)).sin().float()
        return mixed(self.mix, sines, pitch.squeeze(-1), self.noise, positions)

    def stream(
        self,
        mel: torch.Tensor,
        source: torch.Tensor,
        left: torch.Tensor,
        kept: int,
        received: Sequence[int],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `Hift.stream`; instead of the phase it keeps samples that are faded into the next ones."""
        places = torch.tensor([before - kept for before in received], device=mel.device)
        source = torch.cat([source, self.source(mel, places)[:, source.shape[1] :]], 1)
        samples, size = self.shaping(mel, source), OVERLAP * SAMPLES
        if kept:
            up, down = self.fading.split(size)
            samples = torch.cat([samples[:, :size] * up + left * down, samples[:, size:]], 1)
        if last:
            return samples, mel, source, samples
        return samples[:, :-size], mel[..., -OVERLAP:], source[:, -size:], samples[:, -size:]
