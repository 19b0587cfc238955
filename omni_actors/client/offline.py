"""Offline inference: `OmniLLM("pipeline.yaml").generate(prompts)` starts a pipeline and answers many prompts."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
import typing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from omni_actors.client import OmniClient
from omni_actors.client.async_client import AsyncOmniClient
from omni_actors.client.prompts import Prompting, to_params
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.errors import ConfigError, InvalidRequest, OmniError, Overloaded, RequestTimeout, StartupError, suggest
from omni_actors.host.processes import ChildStopTime, end_tasks
from omni_actors.host.run_directory import short_temporary_folder
from omni_actors.logs import redraw
from omni_actors.protocol.messages import Description, Submit
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, StageParams

TITLE = "Processed prompts"


def start_line(description: Description, seconds: float) -> str:
    """How far a pipeline's start has come, for `logs.redraw`."""
    states = {f"{stage.stage}/{stage.replica}": stage.state for stage in description.stages}
    missing = [f"{name} ({state})" for name, state in states.items() if state != "ready"]
    return f"{len(states) - len(missing)} of {len(states)} ready after {seconds:.0f} s; missing: {', '.join(missing)}"


@contextlib.contextmanager
def progress_bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Callable[[int], object]]:
    """Show a bar for `total` prompts; yields what is called with the number of those that are done.

    Args:
        use_tqdm: `True` for a bar on standard error if that is a terminal, `False` for none, or a class such as `tqdm`,
            called with the keywords of vLLM: `total`, `desc`, `dynamic_ncols`.

    Raises:
        InvalidRequest: `use_tqdm` is something else.
    """
    if callable(use_tqdm):
        with contextlib.closing(use_tqdm(total=total, desc=TITLE, dynamic_ncols=True)) as bar:
            yield bar.update
        return
    if not isinstance(use_tqdm, bool):
        raise InvalidRequest(f"use_tqdm is True, False or a class such as tqdm; got {use_tqdm!r}.")
    if not use_tqdm or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console  # takes 0.1 s, which only those who see a bar should wait for
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(TITLE, total=total)
        yield lambda n: progress.advance(task, n)


OneStageParams = StageParams | Mapping[str, Any] | None
PipelineParams = Mapping[str, OneStageParams] | Sequence[OneStageParams]

_SUBMIT = typing.get_type_hints(Submit, include_extras=True)
_PER_PROMPT: dict[str, Any] = {
    **{name: _SUBMIT[name] for name in ("voice", "priority", "traceparent")},
    "seed": _SUBMIT["seed"] | None,
    "modalities": _SUBMIT["modalities"] | None,
    "timeout": float | None,
    "request_id": str | None,
    ADDITIONAL_INFORMATION: dict[str, Any] | None,
}
# Media and the like are one value for all prompts: they are lists already. Those of single prompts go in the prompts.
_FOR_ALL = frozenset(inspect.signature(AsyncOmniClient.submit).parameters) - {"self", "prompt", "params", *_PER_PROMPT}


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list or a tuple, and not a text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def spread(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """Return `given` once per prompt: a list has one value for each of `count` prompts, anything else is for all.

    Args:
        kind: type of one value, as msgspec understands it.

    Raises:
        InvalidRequest: the list has another length, or a value another type; `name` is in the message.
    """
    values = list(given) if is_list(given) else [given] * count
    if len(values) != count:
        raise InvalidRequest(
            f"{name} has {len(values)} values for {count} prompts.", hint="Give one value for all, or one for each."
        )
    try:
        return [msgspec.convert(value, kind) for value in values]
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"{name}: {error}.", hint="Give one value for all prompts, or a list of them.") from error


def spread_options(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of `AsyncOmniClient.submit` for each of `count` prompts.

    Raises:
        InvalidRequest: an option is unknown, or `spread` refuses it.
    """
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, given in options.items():
        if name not in _PER_PROMPT and name not in _FOR_ALL:
            raise InvalidRequest(f"There is no option {name!r}.{suggest(name, [*_PER_PROMPT, *_FOR_ALL])}")
        one = name == "modalities" and is_list(given) and all(isinstance(item, str) for item in given)
        each = [given] * count if one or name in _FOR_ALL else given
        values = spread(name, each, _PER_PROMPT.get(name, Any), count)
        for own, value in zip(result, values, strict=True):
            own[name] = value
    return result


def params_by_stage(name: str, given: PipelineParams | None, stages: Sequence[str]) -> dict[str, StageParams]:
    """Return parameters by stage name.

    Args:
        name: of the argument, for errors.
        given: a mapping by stage name, or a list with one entry for each of `stages`; an entry is a `StageParams`, a
            mapping of its fields, or `None` for the stage's defaults.
        stages: the stages that take parameters, in the pipeline's order.

    Raises:
        InvalidRequest: it has another form, or a parameter is unknown or out of range.
    """
    form = f"a mapping by stage name, or a list with one entry for each of these: {', '.join(stages) or 'none'}"
    if given is None:
        return {}
    if is_list(given):
        if len(given) != len(stages):
            raise InvalidRequest(
                f"{name} has {len(given)} entries for {len(stages)} stages; it is {form}.",
                hint="None stands for a stage's defaults.",
            )
        given = dict(zip(stages, given, strict=True))
    if not isinstance(given, Mapping) or not all(isinstance(stage, str) for stage in given):
        raise InvalidRequest(f"{name} is {form}; got {given!r:.80}.")
    params = {stage: entry for stage, entry in given.items() if entry is not None}
    for stage, entry in params.items():
        if not isinstance(entry, StageParams | Mapping):
            raise InvalidRequest(
                f"{name}, stage {stage!r}: the parameters of a stage are a mapping such as {{'max_tokens': 64}}, a "
                f"StageParams or None; got a {type(entry).__name__}."
            )
    return to_params(params)


def params_of_prompts(
    count: int,
    stages: Sequence[str],
    sampling_params: PipelineParams | None,
    sampling_params_list: Sequence[OneStageParams] | None,
    params_per_prompt: Sequence[PipelineParams | None] | None,
) -> list[dict[str, StageParams]]:
    """Return the parameters by stage of each prompt, from the three arguments that can hold them.

    Raises:
        InvalidRequest: more than one is given, or one has the wrong form or length.
    """
    given: dict[str, Any] = {
        "sampling_params": sampling_params,
        "sampling_params_list": sampling_params_list,
        "params_per_prompt": params_per_prompt,
    }
    names = [name for name, value in given.items() if value is not None] or ["sampling_params"]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} are given; they exclude one another.", hint="Give one of them.")
    if params_per_prompt is None:
        return [params_by_stage(names[0], given[names[0]], stages)] * count
    if not is_list(params_per_prompt) or len(params_per_prompt) != count:
        raise InvalidRequest(f"params_per_prompt is a list with one entry for each of the {count} prompts.")
    return [params_by_stage(f"params_per_prompt[{index}]", own, stages) for index, own in enumerate(params_per_prompt)]


STOP_SECONDS = 15.0  # for a launcher that has not read its configuration yet
POLL_SECONDS = 0.1


class OmniLLM:
    """Runs a pipeline for as long as this object lives. Use it as a context manager.

    The pipeline runs as `python -m omni_actors.launch` in a separate process, so that a script needs no
    `if __name__ == "__main__"` guard, and a crash of either does not take down the other.

    Args:
        config: the pipeline's YAML.
        overrides: values by dotted key, for instance `{"stages.thinker.engine.max_num_seqs": 8}`.
        startup_timeout: seconds until all stages must be ready.

    Raises:
        StartupError, ConfigError: the pipeline did not start; with the launcher's output.
    """

    def __init__(
        self, config: str | Path, overrides: Mapping[str, Any] | None = None, startup_timeout: float = 600.0
    ) -> None:
        self._run_dir = tempfile.mkdtemp(prefix="omni-llm-", dir=short_temporary_folder())
        self._log = open(Path(self._run_dir) / "launcher.log", "w+b")  # noqa: SIM115 - closed in close()
        command = [sys.executable, "-m", "omni_actors.launch", str(config), "--run-dir", self._run_dir]
        for key, value in (overrides or {}).items():
            command += ["--set", f"{key}={value}"]
        self._stop_time = ChildStopTime(STOP_SECONDS)
        options = self._stop_time.popen_arguments(os.environ)
        # In a new session: Ctrl-C in the script must reach the launcher through close(), and not directly.
        self._launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True, **options
        )
        self._client: OmniClient | None = None
        self._keep = False  # the logs, as they may explain what went wrong
        try:
            self._client = self._connect(startup_timeout)
        except StartupError as error:
            self._keep = True
            self.close()
            raise StartupError(error.message, hint=f"The logs stay in {self._run_dir}.") from error
        except BaseException:  # Ctrl-C, too: the launcher must not stay behind
            self.close()
            raise

    def _connect(self, timeout: float) -> OmniClient:
        began = time.monotonic()
        deadline = began + timeout
        client = OmniClient(self.endpoint)
        try:
            while True:
                if self._launcher.poll() is not None:
                    raise self._start_failure()
                if time.monotonic() > deadline:
                    raise StartupError(f"The pipeline was not ready within {timeout:g} s.\n{self._log_text()}")
                with contextlib.suppress(RequestTimeout):
                    description = client.describe(timeout=1.0)
                    if description.healthy:
                        redraw("")
                        return client
                    redraw(start_line(description, time.monotonic() - began))
                time.sleep(POLL_SECONDS)
        except BaseException:  # Ctrl-C, too: the client's thread must not stay behind
            client.close()
            raise

    def _start_failure(self) -> OmniError:
        text = self._log_text()
        kind = ConfigError if self._launcher.returncode == 2 else StartupError
        return kind(f"The launcher ended with exit code {self._launcher.returncode}:\n{text}", hint="")

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    @property
    def endpoint(self) -> str:
        """Where other clients may connect while this pipeline lives."""
        return f"ipc://{self._run_dir}/client"

    @property
    def client(self) -> OmniClient:
        """The connection to the pipeline, for streaming."""
        if self._client is None:
            raise StartupError("This OmniLLM is closed.", hint="Make a new one.")
        return self._client

    def generate(
        self,
        prompts: Prompting | Sequence[Prompting],
        sampling_params: PipelineParams | None = None,
        *,
        sampling_params_list: Sequence[OneStageParams] | None = None,
        params_per_prompt: Sequence[PipelineParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[OmniRequestOutput]:
        """Answer all prompts at once: the stages work on different prompts at the same time.

        Parameters of one stage are a mapping such as `{"max_tokens": 64}`, a `StageParams`, or `None` for the stage's
        defaults. A list of them has one entry for each stage that takes parameters, in the pipeline's order; most
        of kind `prompt` take none. For Qwen2.5-Omni that is thinker, talker, code2wav.

        Args:
            prompts: one or more prompts, as for `AsyncOmniClient.submit`; a list of chat messages is one prompt.
            sampling_params: parameters for all prompts: a mapping by stage name, or a list by stage.
            sampling_params_list: the list by stage, under the name that it has in vllm-omni.
            params_per_prompt: parameters of each prompt: a list with one mapping by stage name, list by stage, or
                `None` per prompt.
            use_tqdm: shows a progress bar if standard error is a terminal; `False` never does. A class such as `tqdm`
                makes the bar: it is called with `total`, `desc` and `dynamic_ncols`.
            options: modalities, voice, seed, priority, timeout, request_id, traceparent and additional_information, as
                for `AsyncOmniClient.submit`, each one value for all prompts or a list with one per prompt; audios,
                images and videos for all. Of prompts that the pipeline does not admit yet, those with a lower
                `priority` go first.

        Returns:
            One output per prompt, in order. A prompt that failed has its `error` set; the others are complete.

        Raises:
            InvalidRequest: an argument has the wrong form or length, or an option is unknown; nothing was sent.
            RequestTimeout: the pipeline does not answer.
        """
        many = as_prompts(prompts)
        pipeline = self.client.describe()
        params = params_of_prompts(
            len(many), pipeline.sampling_stages, sampling_params, sampling_params_list, params_per_prompt
        )
        submitted = [
            {"prompt": prompt, "params": own, **rest}
            for prompt, own, rest in zip(many, params, spread_options(options, len(many)), strict=True)
        ]
        with progress_bar(len(many), use_tqdm) as done:
            return self.client.run(lambda client: answer_all(client, submitted, pipeline.max_in_flight, done))

    def close(self) -> None:
        """Stop the pipeline and remove its files. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._launcher.poll() is None:
            self._launcher.terminate()
            try:
                self._launcher.wait(self._stop_time.seconds)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # its children notice and end by themselves
                self._launcher.wait()
        self._stop_time.close()
        self._log.close()
        if os.path.isdir(self._run_dir) and not self._keep:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_prompts(prompts: Prompting | Sequence[Prompting]) -> list[Prompting]:
    """Return a single prompt as a list of one. A list of messages (mappings with a role) is one prompt.

    Raises:
        InvalidRequest: it is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        many: list[Any] = list(prompts)
    except TypeError as error:
        raise InvalidRequest(f"A {type(prompts).__name__} is neither a prompt nor a list of prompts.") from error
    if many and all(isinstance(item, Mapping) and "role" in item for item in many):
        return [many]
    return many


RETRY_SECONDS = 0.1


async def answer_all(
    client: AsyncOmniClient, submitted: Sequence[Mapping[str, Any]], at_a_time: int, done: Callable[[int], object]
) -> list[OmniRequestOutput]:
    """Return one output per request, in order; one that failed has its `error` set.

    Args:
        submitted: the arguments of `AsyncOmniClient.submit` of each request.
        at_a_time: requests to have in flight. Of those that wait here, lower values of `priority` go first, then
            earlier ones.
        done: called with 1 for each request that is answered.
    """
    outputs: dict[int, OmniRequestOutput] = {}
    waiting = [(options.get("priority", 0), index) for index, options in enumerate(submitted)]
    heapq.heapify(waiting)

    async def work() -> None:
        while waiting:
            place = heapq.heappop(waiting)
            try:
                outputs[place[1]] = await _answer(client, submitted[place[1]])
            except Overloaded as error:  # another client of this pipeline has requests, too
                heapq.heappush(waiting, place)
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)
            else:
                done(1)

    workers = [asyncio.create_task(work()) for _ in range(min(at_a_time, len(submitted)))]
    try:
        await asyncio.gather(*workers)
    finally:
        await end_tasks(*workers)
    return [outputs[index] for index in range(len(submitted))]


async def _answer(client: AsyncOmniClient, options: Mapping[str, Any]) -> OmniRequestOutput:
    """Answer one request. Raises `Overloaded`; all other errors of the request are in the output."""
    request_id = options.get("request_id") or uuid.uuid4().hex
    try:
        return await client.generate(**{**options, "request_id": request_id})
    except Overloaded:
        raise
    except OmniError as error:
        return OmniRequestOutput(request_id, error=error)
