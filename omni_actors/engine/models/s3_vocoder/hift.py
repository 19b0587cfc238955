"""HiFT: mel frames to sound. A predicted pitch drives an oscillator; the network shapes its spectrum into speech.

Every layer looks back only, but for a few frames at the front: the pitch waits for `pitch_ahead` frames, the network
for those of its first convolution and one more. A window of mel frames with enough of the past gives the samples of its
new frames exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.s3_vocoder.weights import Weights

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
        # By windows and their frames: what `forward` reads, and the samples.
        self._graphs: CudaGraphs[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = CudaGraphs()

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

    def forward(self, mel: torch.Tensor, source: torch.Tensor, *, last: bool = True) -> torch.Tensor:
        """Samples [batch, time] of a window; without those of the look-ahead, unless it is over.

        Args:
            mel: [batch, mels, frames].
            source: [batch, samples], of all of them.
        """
        size, looks_ahead = 2 * (self.bins - 1), self._convolve is causal
        spectrum = torch.stft(source, size, self.hop, size, self.window, return_complex=True)
        if not last:
            spectrum = spectrum[..., : -self.frames * (self.ahead - 1)]
        wave = torch.cat([spectrum.real, spectrum.imag], 1)
        if looks_ahead:
            hidden = self.before(F.pad(mel, (0, self.ahead - 1 if last else 0)))
        else:
            hidden = centered(self.before, mel)
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
        samples = self._sound(shaped)
        return (samples if last else samples[:, :-SAMPLES]).clamp(-PEAK, PEAK)

    def streamed(self, mel: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `forward`, of windows that are not the last: by a graph, if one takes them."""
        count, _, frames = mel.shape
        key = min((key for key in self._graphs.tensors if key[1] == frames and key[0] >= count), default=None)
        if key is None:
            return cast("torch.Tensor", self(mel, source, last=False))
        for own, given in zip(self._graphs.tensors[key][:2], (mel, source), strict=True):
            own[:count] = given
        return self._graphs.replay(key)[2][:count].clone()

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], lengths: Sequence[int]) -> None:
        """Capture graphs of so many windows of so many frames. Needs CUDA."""
        snake = torch.compile(_snake, dynamic=True)
        for residual in (*self.sources, *self.shapes):
            cast("_Residual", residual).snake = snake
        make = self.window.new_zeros
        for size in sorted(sizes, reverse=True):  # the largest first: the others use its memory
            for frames in sorted(lengths, reverse=True):
                mel, source = make(size, self.before.in_channels, frames), make(size, frames * SAMPLES)
                self._graphs.capture((size, frames), partial(self._captured, mel, source))

    def _captured(self, mel: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return mel, source, self(mel, source, last=False)

    def _sound(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Samples [batch, time] of a spectrum [batch, bins, time], as `torch.istft`, which waits for the device."""
        window, count = self.window[:, None], spectrum.shape[2]
        size = len(window)
        frames = torch.fft.irfft(spectrum, size, dim=1) * window
        weights = window.square().expand(1, -1, count)
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
        pitch_ahead, pitch_behind: mel frames around a frame that its pitch depends on.
        delay: frames that the sound waits for.
        behind: frames before a frame on which its samples may depend.
        least: tokens of a first chunk; fewer have no frame whose pitch is known.
    """

    noise: torch.Tensor  # f32 [samples, harmonics]
    least = 2

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        # In float64: errors of the pitch add up in the phase of the oscillator.
        pitch = [
            weights.conv(f"f0_predictor.condnet.{2 * index}", dtype=torch.float64)
            for index in range(weights.count("f0_predictor.condnet."))
        ]
        self.pitch, self.classify = nn.ModuleList(pitch), weights.linear("f0_predictor.classifier", torch.float64)
        self.mix = weights.linear("m_source.l_linear")
        self.shaping = Shaping(weights, causal)
        self.pitch_ahead, *behind = map(_reach, pitch)
        self.pitch_behind = sum(behind)
        self.delay, self.behind = self.pitch_ahead + self.shaping.ahead, self.shaping.behind
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(NOISE_SECONDS * SAMPLE_RATE, self.mix.in_features, generator=generator)
        self.register_buffer("noise", noise, persistent=False)

    @property
    def begun(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an utterance begins with: mel frames, samples of the oscillator, and its phase."""
        rows = self.noise.new_zeros
        return rows(self.shaping.before.in_channels, 0), rows(0), rows(self.mix.in_features, dtype=torch.float64)

    def capture(self, sizes: Sequence[int], first: int, lengths: Sequence[int]) -> None:
        """Capture graphs of so many first chunks of `first` frames, and later ones of all `lengths`, on CUDA."""
        frames = {each - self.pitch_ahead for each in (first, *(self.delay + self.behind + each for each in lengths))}
        if self.noise.is_cuda:
            self.shaping.capture(sizes, [each for each in frames if each > self.shaping.ahead])

    def pitches(self, mel: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Hz [batch, frames] of mel frames; without those of the look-ahead, unless it is over."""
        first, *others = self.pitch
        hidden = F.elu(first(F.pad(mel.double(), (0, self.pitch_ahead if last else 0))))
        for conv in others:
            hidden = F.elu(causal(conv, hidden))
        pitches: torch.Tensor = self.classify(hidden.transpose(1, 2))
        return pitches.squeeze(-1).abs().float()

    def source(
        self, pitch: torch.Tensor, phase: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The oscillator's samples [batch, samples] of frames with a pitch in Hz, and its phase after them.

        Args:
            phase: f64 [batch, harmonics], in cycles.
            positions: i64 [batch], frames of the utterance before these.
        """
        harmonics = torch.arange(1, phase.shape[1] + 1, device=pitch.device)
        steps = (pitch[..., None] * harmonics / SAMPLE_RATE).remainder(1)
        cycles = steps.double().cumsum(1) * SAMPLES + phase[:, None]
        sines = (cycles.remainder(1) * (2 * math.pi)).sin().float().repeat_interleave(SAMPLES, 1)
        return mixed(self.mix, sines, pitch, self.noise, positions), cycles[:, -1].remainder(1)

    def stream(
        self,
        mel: torch.Tensor,
        source: torch.Tensor,
        phase: torch.Tensor,
        kept: int,
        received: Sequence[int],
        *,
        last: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Samples [batch, time] of the frames that have not sounded, and what is left: mel, source and phase.

        Args:
            mel: [batch, mels, frames], of which `kept` came with chunks before.
            source: [batch, samples], of those of them whose pitch was known.
            received: frames of the utterances before this chunk.
        """
        frames = mel.shape[2]
        known, sounded = max(0, kept - self.pitch_ahead), max(0, kept - self.delay)
        begin = max(0, known - self.pitch_behind)
        pitch = self.pitches(mel[..., begin:], last=last)[:, known - begin :]
        places = torch.tensor([before - kept + known for before in received], device=mel.device)
        new, phase = self.source(pitch, phase, places)
        source = torch.cat([source, new], 1)
        known += pitch.shape[1]
        sound = source[:, :0]
        if last or frames - self.delay > sounded:
            shaped = self.shaping(mel, source) if last else self.shaping.streamed(mel[..., :known], source)
            sound = shaped[:, sounded * SAMPLES :]
        keep = max(0, frames - self.delay - self.behind)
        return sound, mel[..., keep:], source[:, keep * SAMPLES :], phase
