"""Checks before a launch starts anything: files and folders, flags that need one another, and the one request.

`--check` runs the same checks. They write nothing, and need neither a GPU nor vLLM.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_actors import envs
from omni_actors.config import PipelineConfig, StageKind, placement
from omni_actors.config.checkpoint import checkpoint_class, models_of
from omni_actors.errors import ConfigError, suggest
from omni_actors.host.addresses import is_loopback
from omni_actors.host.paths import check_file_can_be_written, check_readable, expanded
from omni_actors.host.run_directory import check_run_directory
from omni_actors.http_server.settings import check_listening, media_hosts, parse_address
from omni_actors.launcher.extras import HTTP_PACKAGES, IMAGE_PACKAGES, MEDIA_PACKAGES, check_packages, check_platform
from omni_actors.launcher.one_request import IMAGE_SUFFIXES, needed_modalities
from omni_actors.launcher.ray_room import check_room
from omni_actors.stage.echo import EchoEngine
from omni_actors.transport.curve import load_keys
from omni_actors.vllm_version import check_installed

MISSING_WITHOUT = {  # flag -> those that mean nothing without it
    "--prompt": (
        "--audio",
        "--image",
        "--save-audio",
        "--save-image",
        "--modalities",
        "--voice",
        "--seed",
        "--timeout",
    ),
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
