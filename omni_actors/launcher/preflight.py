"""Checks before a launch starts anything: files and folders, flags, packages, downloads, engines, room.

`--check` runs the same checks. They write nothing, and need neither a GPU nor vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omni_actors import envs
from omni_actors.config import PipelineConfig, StageConfig, StageKind, host_devices, placement, resolve_class
from omni_actors.config.checkpoint import CONFIG_NAME, VLLM_KINDS, checkpoint_class, models_of
from omni_actors.config.placement import gpus_of_replica
from omni_actors.errors import ERROR_CLASSES, ConfigError, ErrorCode, OmniError, StartupError, suggest
from omni_actors.host import ray_cluster
from omni_actors.host.addresses import is_loopback
from omni_actors.host.run_directory import check_file_can_be_written, check_readable, check_run_directory, expanded
from omni_actors.http_server.settings import check_listening, media_hosts, parse_address
from omni_actors.launcher.one_request import IMAGE_SUFFIXES, needed_modalities
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.transport.curve import load_keys
from omni_actors.vllm_version import Platform, check_installed, find_installed

HTTP_PACKAGES = ("httpcore", "httptools", "multipart", "uvicorn", "uvloop", "websockets")  # of the extra `http`
MEDIA_PACKAGES = ("soxr",)  # of the extras `cuda` and `cpu`, for prompts with sound
IMAGE_PACKAGES = ("PIL",)  # of the extra `http`


def check_platform() -> None:
    """Raise `ConfigError` unless this system can run pipelines."""
    if sys.platform != "linux":
        raise ConfigError(
            f"Pipelines run on Linux only, and this is {sys.platform}.",
            hint="The client library works here: connect it to a pipeline on another host, by tcp:// or HTTP.",
        )


def check_packages(what: str, names: Sequence[str], *extras: str) -> None:
    """Raise `ConfigError` if one of these modules is missing, and name the extras that have it."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{what} needs packages that are not installed: {', '.join(missing)}.",
            hint=f"Run {' or '.join(map(pip_install, extras))}.",
        )


def pip_install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'omni_actors[{extra}]'"


ASK_SECONDS = 5.0
GIB = float(1 << 30)


def pending_download(pipeline: PipelineConfig) -> str:
    """A line on the downloads that the models need; "" if each is a folder, or in the cache, or comes from elsewhere.

    Raises:
        ConfigError: a model is not here and may not be downloaded, or the disk has too little room for all of them.
    """
    models = [model for model in models_of(pipeline) if not Path(model).is_dir()]
    from_modelscope = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if not models or importlib.util.find_spec("huggingface_hub") is None or from_modelscope:
        return ""
    from huggingface_hub import constants, try_to_load_from_cache

    models = [model for model in models if not isinstance(try_to_load_from_cache(model, CONFIG_NAME), str)]
    if not models:
        return ""
    cache = Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{models[0]} is neither a folder nor in the cache {cache}, and HF_HUB_OFFLINE forbids to download it.",
            hint="Download it first (hf download), give --model FOLDER, or unset HF_HUB_OFFLINE.",
        )
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    sizes = [_size(f"{constants.ENDPOINT}/api/models/{model}?blobs=true") for model in models]
    size, names = sum(sizes), " and ".join(models)
    if size > free:
        raise ConfigError(
            f"{names} {'has' if len(models) == 1 else 'have'} {size / GIB:.1f} GiB, and {cache} has room for "
            f"{free / GIB:.1f} GiB.",
            hint="Make room, or set HF_HOME to a folder on a larger disk.",
        )
    known = f"{size / GIB:.1f} GiB" if all(sizes) else "of unknown size"
    verb = "is" if len(models) == 1 else "are"
    return f"{names} {verb} downloaded first ({known}, to {cache}, where {free / GIB:.0f} GiB are free)"


def _size(url: str) -> int:
    """Bytes of a model's files, as the hub describes them at `url`; 0 if it does not."""
    # By hand: the errors of huggingface_hub are those of its HTTP library, which differs between its releases.
    try:
        with urllib.request.urlopen(url, timeout=ASK_SECONDS) as answer:
            return sum(file.get("size") or 0 for file in json.load(answer)["siblings"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no network, no such model, or a login page
        return 0


def check_engines(pipeline: PipelineConfig) -> list[str]:
    """Check the engine options of every stage; returns a line for each group of stages that says what was checked.

    Imports vLLM if a stage runs in it, which takes about ten seconds.

    Raises:
        ConfigError: an option is unknown, of the wrong type or refused by vLLM; with its dotted path.
    """
    checked, notes = [], []
    models = [stage for stage in pipeline.stages if stage.kind in VLLM_KINDS]
    for stage in pipeline.stages:
        if stage not in models:
            if _engine_class(stage).check_options(stage):
                checked.append(stage.name)
            elif stage.engine:
                notes.append(f"not checked: stages.{stage.name}.engine, as {stage.engine_class} has no check_options")
    if models:
        how = _check_models(pipeline, models)
        notes.append(f"{how}: {', '.join(stage.name for stage in models)}")
    return ([f"engine options checked: {', '.join(checked)}"] if checked else []) + notes


def _engine_class(stage: StageConfig) -> type[StageEngine]:
    if stage.kind is StageKind.ECHO:
        return EchoEngine
    if stage.kind is StageKind.DIFFUSERS:
        from omni_actors.engine.pipelines import DiffusersEngine  # imports torch

        return DiffusersEngine
    where = f"stages.{stage.name}.engine_class"
    return cast(type[StageEngine], resolve_class(stage.engine_class or "", {}, StageEngine, where))


def _check_models(pipeline: PipelineConfig, stages: Sequence[StageConfig]) -> str:
    """Check the stages that run in vLLM; returns what was checked and what was not."""
    try:
        find_installed()
    except ConfigError:
        return "engine options not checked, as vLLM is not installed"
    platform = check_installed().platform
    # What is wrong is an error; what the libraries say besides is in the logs of a launch.
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "TRANSFORMERS_VERBOSITY": "error"}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from omni_actors.engine.arguments import check_arguments

    has_device = platform is Platform.CPU or host_devices() > 0
    elsewhere = [model for model in models_of(pipeline) if not Path(model).is_dir()]
    check_arguments(pipeline, stages, with_checkpoint=has_device and not elsewhere)
    if has_device and not elsewhere:
        return "engine options checked with vLLM and the checkpoint"
    missing = f"{elsewhere[0]} is not a local folder" if elsewhere else "this host has no GPU"
    return f"engine options checked by name and type only, as {missing}"


CHECK = "omni_actors.engine.workers.ray"
CHECK_SECONDS = 120.0  # imports, a connection and a reservation, each with a shorter deadline of its own
TAIL_LINES = 5


def check_room(pipeline: PipelineConfig) -> None:
    """Reserve what these stages need and give it back; nothing if there are none.

    Raises:
        ConfigError: Ray is missing or of another version than vLLM takes, vLLM has no Ray executor for this platform,
            there is no cluster to reach, or it is too small.
        StartupError: the cluster is not free enough, or does not answer.
    """
    here = placement.replicas_of(pipeline, pipeline.cluster.node_rank)
    stages = [stage for name, _ in here if (stage := pipeline.stage(name)).executor == "ray"]
    if not stages:
        return
    ray_cluster.check_installed()
    names = ", ".join(dict.fromkeys(stage.name for stage in stages))
    command = [sys.executable, "-m", CHECK, str(sum(map(gpus_of_replica, stages))), names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            f"Ray did not say within {CHECK_SECONDS:g} s whether it has room for {names}.",
            hint="Look at the cluster with `ray status`.",
        ) from error
    if done.returncode:
        raise failure_of(done.stdout, done.stderr)


def failure_of(stdout: str, stderr: str) -> OmniError:
    """The error that the check has printed; without one, what it has complained about."""
    said = next((line for line in reversed(stdout.splitlines()) if line.startswith("[")), None)
    if said is None:
        tail = "\n".join(stderr.splitlines()[-TAIL_LINES:])
        return StartupError(f"Looking for room on the Ray cluster failed:\n{tail}")
    code, message, hint = json.loads(said)
    return ERROR_CLASSES[ErrorCode(code)](message, hint=hint)


ANSWER_FLAGS = ("--save-audio", "--save-image", "--modalities", "--voice", "--seed", "--timeout")
MISSING_WITHOUT = {  # flag -> those that mean nothing without it
    "--prompt": ("--audio", "--image", *ANSWER_FLAGS),
    "--http": ("--http-insecure", "--served-name", "--voice-alias", "--media-host"),
    "--metrics": ("--metrics-insecure",),
    "--check": ("--gpus",),
}


def check_launch(pipeline: PipelineConfig, options: argparse.Namespace) -> None:
    """Raise `ConfigError` for the first thing that would make the launch, or its request, fail."""
    coordinator, rank = pipeline.coordinator, pipeline.cluster.node_rank
    check_platform()
    load_keys(coordinator.keys_dir)
    if coordinator.run_dir is not None:
        check_run_directory(coordinator.run_dir)
    for stage in pipeline.stages:
        if stage.kind is StageKind.ECHO:
            EchoEngine.check_options(stage)
    if not options.check:  # which also runs where nothing is to be served
        if placement.runs_models(pipeline, rank):
            check_installed()
        check_room(pipeline)
        for name, _ in placement.replicas_of(pipeline, rank):
            if pipeline.stage(name).kind is StageKind.PROMPT:
                check_packages(f"The stage {name}", MEDIA_PACKAGES, "cuda", "cpu")
            if pipeline.stage(name).kind is StageKind.DIFFUSERS:
                check_packages(f"The stage {name}", ("diffusers",), "image")
    if placement.runs_models(pipeline, rank):
        for model in models_of(pipeline):
            if Path(model).is_dir():
                checkpoint_class(Path(model))
    for needed, flags in MISSING_WITHOUT.items():
        given = [flag for flag in flags if _is_given(options, flag)]
        if given and not _is_given(options, needed):
            raise ConfigError(f"{given[0]} goes with {needed}, which is not given.", hint="Add it, or leave both out.")
    if rank > 0:  # the same command runs on every node, and these only on the first
        return
    if options.headless and (options.http or options.prompt is not None):
        raise ConfigError("--headless runs stages only; it goes with neither --http nor --prompt.")
    if options.metrics is not None:
        check_metrics_address(options.metrics, options.metrics_insecure)
    if options.http is not None:
        _check_http(pipeline, options)
    if options.prompt is not None:
        _check_request(pipeline, options)


def _is_given(options: argparse.Namespace, flag: str) -> bool:
    value = getattr(options, flag[2:].replace("-", "_"))
    return not (value is None or value is False or value == [])  # a seed of 0 is given


def check_metrics_address(address: str, insecure: bool) -> tuple[str, int]:
    """Return host and port. Raises `ConfigError` if the address is wrong or would be open to others."""
    host, port = parse_address(address, "--metrics")
    if not is_loopback(host) and not insecure:
        raise ConfigError(
            f"--metrics {host}: metrics have no key, so that anyone who reaches the address can read them.",
            hint="Use 127.0.0.1, or add --metrics-insecure if that is intended.",
        )
    return host, port


def _check_http(pipeline: PipelineConfig, options: argparse.Namespace) -> None:
    check_packages("--http", HTTP_PACKAGES, "http")
    check_listening(options.http, pipeline.http, envs.api_key(), options.http_insecure)
    media_hosts(options)
    timeout, latest = pipeline.http.request_timeout, pipeline.coordinator.max_timeout
    if timeout > latest:
        raise ConfigError(
            f"http.request_timeout ({timeout:g} s) is more than coordinator.max_timeout ({latest:g} s), so that every "
            "request without a `timeout` of its own would be refused.",
            hint="Lower the former or raise the latter.",
        )


def _check_request(pipeline: PipelineConfig, options: argparse.Namespace) -> None:
    media = [("--audio", name) for name in options.audio] + [("--image", name) for name in options.image]
    if not options.prompt and not media:
        raise ConfigError("--prompt is empty.", hint="Give a text, or media to go with it.")
    limits, size = pipeline.limits, len(options.prompt.encode())
    if size > limits.body_bytes:
        raise ConfigError(f"--prompt has {size} bytes; limits.body_bytes is {limits.body_bytes}.")
    if len(media) > limits.buffers:
        raise ConfigError(f"{len(media)} files are given with --prompt; limits.buffers is {limits.buffers}.")
    total = 0
    for flag, name in media:
        path = expanded(name, flag)
        size = check_readable(path, flag)
        total += size
        if not 0 < size <= limits.buffer_bytes:
            raise ConfigError(f"{flag}: {path} has {size} bytes; from 1 to {limits.buffer_bytes} are possible.")
    if total > limits.message_bytes:
        raise ConfigError(
            f"The files given with --prompt have {total} bytes; at most {limits.message_bytes} can be sent."
        )
    latest = pipeline.coordinator.max_timeout
    if options.timeout is not None and options.timeout > latest:
        raise ConfigError(f"--timeout: {options.timeout:g} s is more than coordinator.max_timeout, {latest:g} s.")
    _check_answer(pipeline, options)


def _check_answer(pipeline: PipelineConfig, options: argparse.Namespace) -> None:
    offered = [modality.value for modality in pipeline.modalities]
    needed = needed_modalities(options)
    for modality in needed or ():
        if modality not in offered:
            raise ConfigError(
                f"--modalities: this pipeline does not answer in {modality!r}.{suggest(modality, offered)}",
                hint=f"Use --modalities {','.join(offered)}.",
            )
    if options.save_audio is not None:
        if "audio" not in (needed or offered):
            raise ConfigError(
                "--save-audio: the answer has no audio.", hint="Add --modalities text,audio, where it is offered."
            )
        check_file_can_be_written(expanded(options.save_audio, "--save-audio"), "--save-audio")
    if options.save_image is not None:
        if "image" not in (needed or offered):
            raise ConfigError(
                "--save-image: the answer has no picture.", hint="Add --modalities image, where it is offered."
            )
        if options.save_image.suffix.lower() not in IMAGE_SUFFIXES:
            raise ConfigError(f"--save-image: the name ends with none of {', '.join(IMAGE_SUFFIXES)}.")
        check_packages("--save-image", IMAGE_PACKAGES, "http")
        check_file_can_be_written(expanded(options.save_image, "--save-image"), "--save-image")
