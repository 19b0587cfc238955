"""The engine of a `diffusers` stage: any pipeline class of diffusers as it is, and a step of one request at a time.

Each request is one call of the pipeline, on a thread of its own and on a copy that shares the components but has
schedulers of its own. After each denoising step the call stops in the pipeline's callback until its next turn, so one
thread computes at a time. Requests with the lowest priority value take turns; a pipeline without a callback takes one
turn for the whole call. What a request gets is what diffusers gives for the same arguments and a generator on the CPU
with its seed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from PIL import Image, ImageOps

from omni_actors.config.checkpoint import model_of
from omni_actors.config.checks import adapted_stages, check_parameters, with_defaults
from omni_actors.config.loading import engine_options
from omni_actors.config.schema import Modality, PipelineConfig, StageConfig
from omni_actors.engine.models.pictures import ADAPTER, PREVIEWS, Given, layered_pictures, on_white
from omni_actors.engine.rows import check_finite, to_host
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, ModelOutputInvalid, OmniError, StartupError
from omni_actors.logs import get_logger
from omni_actors.media.decoders import DecoderThreads, MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import FrameRate, Parameter, StageParams
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    EngineLost,
    ErrorEvent,
    FinishedEvent,
    ImageEvent,
    ProgressEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    VideoEvent,
    preview_steps,
)

logger = get_logger(__name__)

MAX_PICTURES = 16
MOST_CHARACTERS = 65_536
CHUNK_BYTES = 8 << 20  # of the frames in a message
VIDEO_BYTES = 1 << 30  # of all frames of a video
STEP_CALLBACK, OLD_CALLBACK = "callback_on_step_end", "callback"  # of newer and of older pipelines
FRAMES = ("num_frames", "frames")  # arguments of pipelines that make video
RATES = ("frame_rate", "fps")  # of some of them
MASKS = ("mask_image", "mask")  # of pipelines that change a part of a picture
SECONDS = Parameter("seconds", "float", 0, 120, about="length of the video")
MASK = Parameter("mask", "bool", about="the last picture is a mask, transparent or white where the others change")
# Argument of a pipeline's call, and the parameter that sets it.
DECLARED: Mapping[str, Parameter] = {
    "width": Parameter("width", "int", 16, 8192, about="pixels"),
    "height": Parameter("height", "int", 16, 8192, about="pixels"),
    "num_inference_steps": Parameter("num_steps", "int", 1, 1000, about="denoising steps"),
    "guidance_scale": Parameter("guidance_scale", "float", 0, 100, about="how strongly the prompt is followed"),
    "negative_prompt": Parameter("negative_prompt", "text", most=MOST_CHARACTERS, about="what is not wanted"),
    **dict.fromkeys(FRAMES, SECONDS),
    **dict.fromkeys(MASKS, MASK),
}
Limits = Annotated[tuple[float, float], Meta(description="smallest and largest value")]
Name = Annotated[str, Meta(pattern="^[a-z_][a-z0-9_]{0,63}$")]


class PipelineOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options in the YAML's `engine` mapping of a diffusers stage.

    Args:
        pipeline: class of diffusers that loads the checkpoint; by default the one that its model_index.json names.
        dtype: of all components.
        max_num_seqs: requests that are under way at a time.
        frames_per_second: of video, where the pipeline has no argument for it.
        arguments: further arguments of each call, by the names that the pipeline gives them.
        parameters: numbers that requests may set as parameters of the stage, by those names, each with its limits.
    """

    pipeline: Annotated[str, Meta(pattern="^[A-Za-z0-9_]{1,128}$")] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)] = 4
    frames_per_second: FrameRate = 16.0
    arguments: dict[Name, Any] = {}
    parameters: dict[Name, Limits] = {}

    @classmethod
    def of(cls, stage: StageConfig) -> PipelineOptions:
        """Read a stage's options. Raises `ConfigError` for a wrong one."""
        options = engine_options(stage, cls)
        for name in options.arguments.keys() & (RESERVED | options.parameters.keys()):
            where = f"stages.{stage.name}.engine.arguments.{name}"
            raise ConfigError(f"{where} is set by the stage itself.", hint="Leave it out.")
        return options


RESERVED = {
    *("prompt", "image", "generator", "output_type", "return_dict", STEP_CALLBACK, OLD_CALLBACK, "callback_steps"),
    *("num_images_per_prompt", "num_waveforms_per_prompt", "num_videos_per_prompt"),
    *("callback_on_step_end_tensor_inputs", *MASKS),
}


class CallStopped(Exception):
    """Unwinds the call of an abandoned request."""


class SteppedCall:
    """One call of a pipeline on a thread, which computes during `turn` and at no other time.

    Args:
        run: makes the call, given a function to call after each step.
    """

    def __init__(self, threads: ThreadPoolExecutor, run: Callable[[Callable[[], None]], Any]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self.result = threads.submit(self._live, run)
        self.result.add_done_callback(lambda _: self._stopped.release())

    def turn(self) -> None:
        """Compute up to the end of the next step, or of the call."""
        self._go.release()
        self._stopped.acquire()

    def close(self) -> None:
        """End the call where it is."""
        if not self.result.done():
            self._ending = True
            self.turn()

    def _live(self, run: Callable[[Callable[[], None]], Any]) -> Any:
        self._wait()
        return run(self._pause)

    def _pause(self) -> None:
        self._stopped.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._ending:
            raise CallStopped


class PipelineRequest(Struct, eq=False):
    """A request: what it asks for, its pictures once they are decoded, and its call once it has one."""

    request: StageRequest
    text: str
    params: StageParams
    arrival: int
    decoding: MediaDecoder | None = None
    pictures: list[Image.Image] = []
    call: SteppedCall | None = None
    rate: float = 0.0  # frames per second
    steps: int = 0
    shown: list[Any] = []  # results that are previews, until they are sent
    turn: int = 0  # number of its latest turn, among those of all requests

    @property
    def ready(self) -> bool:
        """Whether its pictures are decoded, or failed to be."""
        return self.decoding is None or self.decoding.future.done()

    def close(self) -> None:
        """Give up what is being decoded or computed."""
        if self.decoding is not None:
            self.decoding.cancel()
        if self.call is not None:
            self.call.close()


class DiffusersEngine(StageEngine):
    """The engine that this module describes.

    Raises:
        ConfigError: wrong options, or a pipeline that takes no prompt, makes other outputs or is not one of diffusers.
        StartupError: the checkpoint does not load.
    """

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        self._stage = stage
        self._options = PipelineOptions.of(stage)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._pipeline = _load(model_of(pipeline, stage), self._options, f"stages.{stage.name}").to(self._device)
        self._pipeline.set_progress_bar_config(disable=True)
        adapters = pipeline.adapters if stage.name in adapted_stages(pipeline) else {}
        _load_adapters(self._pipeline, adapters)
        self._adapter: str | None = None  # the one that is computed with
        self._arguments = _arguments_of(self._pipeline, self._options, stage)
        self._frames, self._mask = (
            next((name for name in names if name in self._arguments), "") for names in (FRAMES, MASKS)
        )
        declared = _declared(self._arguments, self._rate_of(self._options.arguments))
        self._steps = next((int(one.default or 1) for one in declared if one.name == "num_steps"), 1)
        declared += [Parameter(name, "float", *limits) for name, limits in self._options.parameters.items()]
        declared += [ADAPTER] if adapters else []
        previews = STEP_CALLBACK in self._arguments and hasattr(type(self._pipeline), "interrupt")
        declared += [PREVIEWS] if previews and Modality.IMAGE in stage.outputs else []
        self._media = {"image": MAX_PICTURES if "image" in self._arguments else 0, "audio": 0, "video": 0}
        self._facts = EngineFacts(
            sample_rate=_sample_rate(self._pipeline) if "audio" in stage.outputs else 0,
            max_media=self._media,
            parameters=with_defaults(declared, stage.sampling),
        )
        self._requests: dict[str, PipelineRequest] = {}
        self._arrivals = self._turns = 0
        self._scheduled: list[tuple[str, float]] = []
        self._threads = ThreadPoolExecutor(self._options.max_num_seqs, thread_name_prefix="pipeline")
        self._decoders = DecoderThreads()

    @classmethod
    def check_options(cls, stage: StageConfig) -> bool:
        """See `StageEngine.check_options`; loads nothing."""
        PipelineOptions.of(stage)
        return True

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return self._facts

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Check a request, and have its pictures decoded. Raises `OmniError`."""
        check_parameters(self._stage.name, self._facts.parameters, request.params)
        prompt = inputs.prompt
        if prompt is None:
            raise InvalidRequest("A diffusers stage takes a prompt.", field="prompt")
        parts = [part for message in prompt.messages for part in message.content]
        text = "\n".join(part.text for part in parts if part.text)
        order = [part.media for part in parts if part.media is not None]
        media = [(prompt.media[index], inputs.media[index], f"media {index} (image)") for index in order]
        if len(media) > (most := self._media["image"]):
            raise InvalidRequest(f"This pipeline takes {most} pictures; got {len(media)}.", field="prompt")
        params = request.params.merged_over(self._stage.sampling)
        masked = bool((params.extra_args or {}).get(MASK.name))
        needed = most and self._arguments["image"].default is inspect.Parameter.empty
        if len(media) <= masked and (masked or needed):
            raise InvalidRequest("This pipeline changes pictures, and there is none in the prompt.", field="image")
        running = PipelineRequest(request, text, params, self._arrivals)
        self._arrivals += 1
        self._requests[request.request_id] = running
        if media:
            running.decoding = self._decoders.submit(functools.partial(_decoded, media, masked))
            running.decoding.future.add_done_callback(lambda _: self.wake())

    def abort(self, request_id: str) -> None:
        """Drop a request; a call ends between two of its steps."""
        if (running := self._requests.pop(request_id, None)) is not None:
            running.close()

    def runnable(self) -> bool:
        """Whether a request can take a turn."""
        return any(running.ready for running in self._requests.values())

    def busy(self) -> bool:
        """Whether pictures are being decoded."""
        return any(not running.ready for running in self._requests.values())

    def step(self) -> Sequence[EngineEvent]:
        """Give a turn to the next request. Raises `EngineLost` if the device fails."""
        running = self._next()
        if running is None:
            return []
        request_id = running.request.request_id
        try:
            if running.call is None:
                running.call = self._begin(running)
                self._scheduled.append((request_id, time.monotonic()))
            self._turns += 1
            running.turn, before = self._turns, running.steps
            self._adapt(running.params.adapter)
            running.call.turn()
            progress: list[EngineEvent] = []
            if running.steps > before:
                steps = max(running.steps, running.params.num_steps or self._steps)
                progress.append(ProgressEvent(request_id, running.steps, steps))
            progress += [_picture(request_id, result, preview=True) for result in running.shown]
            running.shown.clear()
            if not running.call.result.done():
                return progress
            if (failure := running.call.result.exception()) is not None:
                raise _typed(failure)
            events = [*progress, *self._output(running, running.call.result.result())]
        except OmniError as error:
            if isinstance(error, EngineLost):
                raise
            self.abort(request_id)
            return [ErrorEvent(request_id, error)]
        self.abort(request_id)
        return [*events, FinishedEvent(request_id, FinishReason.STOP, len(running.text.split()), running.steps)]

    def _adapt(self, name: str | None) -> None:
        """Have the components, which all requests share, compute with an adapter, or without one."""
        if name is None and self._adapter is not None:
            self._pipeline.disable_lora()
        elif name is not None and name != self._adapter:
            self._pipeline.enable_lora()
            self._pipeline.set_adapters(name)
        self._adapter = name

    def _next(self) -> PipelineRequest | None:
        """The request whose turn it is: by priority, then the one that has waited for the most turns."""
        under_way = sum(running.call is not None for running in self._requests.values())
        can = [
            running
            for running in self._requests.values()
            if running.ready and (running.call is not None or under_way < self._options.max_num_seqs)
        ]
        return min(can, key=lambda one: (one.request.priority, one.turn, one.arrival), default=None)

    def _begin(self, running: PipelineRequest) -> SteppedCall:
        """Make the call of a request, which computes nothing yet. Raises `OmniError` if its pictures are none."""
        if running.decoding is not None:
            running.pictures = running.decoding.future.result()
        given: dict[str, Any] = {**self._options.arguments, "prompt": running.text}
        values = {**running.params.given(), **(running.params.extra_args or {})}
        for name, parameter in DECLARED.items():
            if name in self._arguments and parameter.name in values:
                given[name] = values[parameter.name]
        given |= {name: values[name] for name in self._options.parameters if name in values}
        running.rate = self._rate_of(given)
        if self._frames and SECONDS.name in values:
            given[self._frames] = round(values[SECONDS.name] * running.rate) + 1
        self._check_size(given)
        if given.pop(self._mask, False):
            given[self._mask] = running.pictures.pop()
        if running.pictures:
            given["image"] = running.pictures if len(running.pictures) > 1 else running.pictures[0]

        def call(**more: Any) -> Any:
            pipeline = copy.copy(self._pipeline)
            for name, component in pipeline.components.items():
                if hasattr(component, "set_timesteps"):  # schedulers, which count steps
                    setattr(pipeline, name, copy.deepcopy(component))
            return pipeline(**given, **more, generator=torch.Generator().manual_seed(running.request.effective_seed))

        def preview(latents: torch.Tensor) -> Any:
            # Decoded as this pipeline decodes: by a call that is given the latents and ends with its first step.
            def end(pipeline: Any, *_: Any) -> dict[str, Any]:
                pipeline._interrupt = True
                return {"latents": latents}

            return call(callback_on_step_end=end)

        shown_after = preview_steps(running.params.num_steps or self._steps, running.params.previews or 0)

        def run(pause: Callable[[], None]) -> Any:
            def after_step(*stepped: Any) -> dict[str, Any]:
                running.steps += 1
                if running.steps in shown_after:
                    running.shown.append(preview(stepped[-1]["latents"]))
                pause()
                return {}

            if STEP_CALLBACK in self._arguments:
                return call(callback_on_step_end=after_step)
            if OLD_CALLBACK in self._arguments:
                return call(callback=after_step, callback_steps=1)
            return call()

        return SteppedCall(self._threads, run)

    def _rate_of(self, given: Mapping[str, Any]) -> float:
        """Frames per second of a video that is made with these arguments."""
        rates = [given.get(name, self._arguments[name].default) for name in RATES if name in self._arguments]
        return next((float(rate) for rate in rates if isinstance(rate, int | float)), self._options.frames_per_second)

    def _check_size(self, given: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for a video of too many bytes, as far as its sizes are known."""
        names = (self._frames, "width", "height") if self._frames else ()
        sizes = [given.get(name, self._arguments[name].default) for name in names if name in self._arguments]
        if (size := 3 * math.prod(one for one in sizes if isinstance(one, int))) > VIDEO_BYTES:
            message = f"The frames of this video have {size} bytes; at most {VIDEO_BYTES} are possible."
            raise InvalidRequest(message, hint="Ask for fewer seconds or pixels.", field=SECONDS.name)

    def _output(self, running: PipelineRequest, result: Any) -> list[EngineEvent]:
        """The picture, sound or video of a call. Raises `ModelOutputInvalid` if there is none."""
        request_id = running.request.request_id
        pictures, sounds, videos = (getattr(result, name, None) for name in ("images", "audios", "frames"))
        sounds = getattr(result, "audio", sounds)
        events: list[EngineEvent] = []
        if sounds is not None and self._facts.sample_rate:
            samples = torch.as_tensor(sounds[0]).float().cpu()
            samples = samples.mean(0) if samples.ndim == 2 else samples  # [channels, samples]: one channel is sent
            check_finite(samples, "waveform")
            events.append(AudioEvent(request_id, to_host(samples.contiguous()), self._facts.sample_rate))
        if videos is not None:
            frames = torch.from_numpy(_frames(videos[0]))
            chunks = frames.split(max(1, CHUNK_BYTES // frames[0].nbytes))
            events += [VideoEvent(request_id, to_host(chunk), running.rate) for chunk in chunks]
        elif pictures is not None:
            events.append(_picture(request_id, result, preview=False))
        if not events:
            raise ModelOutputInvalid(f"{type(self._pipeline).__name__} made neither a picture nor sound nor video.")
        return events

    def counts(self) -> dict[str, int]:
        """Requests that are held."""
        return {"requests": len(self._requests)}

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Requests whose call began since the last time."""
        taken, self._scheduled = self._scheduled, []
        return taken

    def device_bytes(self) -> int:
        """Bytes that torch has reserved on the GPU."""
        return torch.cuda.memory_reserved() if self._device.type == "cuda" else 0

    def shutdown(self) -> None:
        """End all calls and the decoders."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._threads.shutdown()
        self._decoders.close()


def _load(model: str, options: PipelineOptions, where: str) -> Any:
    """Load a checkpoint with its own components, or those of the class that the options name."""
    import diffusers

    name = options.pipeline or "DiffusionPipeline"
    found = getattr(diffusers, name, None)
    chosen: Any = found if isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline) else None
    if chosen is None:
        raise ConfigError(f"{where}.engine.pipeline: diffusers {diffusers.__version__} has no pipeline {name!r}.")
    try:
        return chosen.from_pretrained(model, dtype=getattr(torch, options.dtype))
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise StartupError(
            f"diffusers cannot load {model!r} as {name}: {error}", hint="Compare it with the published checkpoint."
        ) from error


def _load_adapters(pipeline: Any, folders: Mapping[str, str]) -> None:
    """Load LoRA adapters by name, and switch them off. Raises `ConfigError`."""
    for name, folder in folders.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
                pipeline.load_lora_weights(folder, adapter_name=name)
        except (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError) as error:
            message = f"adapters.{name}: {type(pipeline).__name__} cannot load {folder}: {error}"
            raise ConfigError(message, hint="Name a folder in which diffusers saved LoRA weights of it.") from error
    if folders:
        pipeline.disable_lora()


def _arguments_of(pipeline: Any, options: PipelineOptions, stage: StageConfig) -> dict[str, inspect.Parameter]:
    """The arguments of a pipeline's call. Raises `ConfigError` for pipelines and options that do not go with this."""
    found = dict(inspect.signature(pipeline.__call__).parameters)
    name, where = type(pipeline).__name__, f"stages.{stage.name}"
    if "prompt" not in found:
        raise ConfigError(f"{where}: {name} takes no prompt; a diffusers stage takes one.")
    if (is_video := any(argument in found for argument in FRAMES)) != (Modality.VIDEO in stage.outputs):
        made, outputs = ("makes video", "[video]") if is_video else ("makes no video", "[image] or [audio]")
        raise ConfigError(f"{where}.outputs: {name} {made}: the outputs are {outputs}.")
    for unknown in (options.arguments.keys() | options.parameters.keys()) - found.keys():
        raise ConfigError(f"{where}.engine: {name} has no argument {unknown!r}.")
    return found


def _declared(arguments: Mapping[str, inspect.Parameter], rate: float) -> list[Parameter]:
    """The parameters of requests that a pipeline takes, with its own defaults; `rate` is that of its frames."""
    own = {name: arguments[name].default for name in DECLARED if name in arguments}
    defaults = {name: default if isinstance(default, int | float) else None for name, default in own.items()}
    defaults |= {name: (count - 1) / rate for name in FRAMES if (count := defaults.get(name)) is not None}
    return [msgspec.structs.replace(DECLARED[name], default=default) for name, default in defaults.items()]


def _sample_rate(pipeline: Any) -> int:
    """The rate of a pipeline's sound, as its vocoder or its VAE says. Raises `ConfigError` if neither does."""
    for name in ("vocoder", "vae"):
        for key in ("sampling_rate", "output_sampling_rate"):
            if (rate := getattr(getattr(getattr(pipeline, name, None), "config", None), key, None)) is not None:
                return int(rate)
    raise ConfigError(f"{type(pipeline).__name__} does not say at which rate it makes sound: is its output a picture?")


def _decoded(media: Sequence[Given], masked: bool, decoder: MediaDecoder) -> list[Image.Image]:
    """The pictures of a prompt as RGB, the last one as a mask if it is `masked`. Raises `OmniError`."""
    pictures = layered_pictures(media, decoder, MediaLimits())
    masks = [pictures.pop()] if masked else []
    return [*map(on_white, pictures), *map(_as_mask, masks)]


def _as_mask(picture: Image.Image) -> Image.Image:
    """A mask as diffusers has it: white where a picture is transparent, or the picture itself if it is nowhere."""
    alpha = picture.getchannel("A")
    return ImageOps.invert(alpha) if np.asarray(alpha).min() < 255 else picture.convert("L")


def _frames(given: Any) -> np.ndarray[Any, Any]:
    """The frames of a video, pictures or numbers from 0 to 1, as u8 [frames, height, width, 3].

    Raises:
        ModelOutputInvalid: they are something else.
    """
    frames = given if isinstance(given, np.ndarray) else np.stack([np.asarray(one) for one in given])
    if frames.dtype.kind == "f" and np.isfinite(frames).all():
        frames = (frames * 255).round().astype(np.uint8)  # as diffusers makes pictures of them
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ModelOutputInvalid(f"The model's video is {frames.dtype} {list(frames.shape)}, not finite [n, h, w, 3].")
    return frames


def _picture(request_id: str, result: Any, *, preview: bool) -> ImageEvent:
    """The picture that a call made, u8 [height, width, 3], or 4 where some of it can be seen through."""
    picture = result.images[0]
    pixels = np.array(picture if picture.mode == "RGBA" else picture.convert("RGB"))
    return ImageEvent(request_id, to_host(torch.from_numpy(pixels)), preview=preview)


def _typed(error: BaseException) -> OmniError:
    """What a pipeline has raised as an error of ours."""
    if isinstance(error, OmniError):
        return error
    if isinstance(error, ValueError):  # what pipelines say of arguments
        return InvalidRequest(f"The pipeline refuses this: {error}")
    logger.error("a pipeline failed", exc_info=error)
    if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
        return EngineLost(f"The device failed: {error}")
    return EngineError(f"The pipeline failed: {type(error).__name__}: {error}")
