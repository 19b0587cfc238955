"""Loads the pipeline's YAML: strictly, checked before anything starts, with the source of every value.

Precedence: command line > environment > SLURM > YAML > default. Unknown keys, cycles of stages, missing stages and
missing devices are errors; the one for an unknown key names the nearest valid key.
"""

from __future__ import annotations

import enum
import functools
import graphlib
import itertools
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, ValidationError

from omni_actors import envs
from omni_actors.config import yaml_reader
from omni_actors.config.checks import check_pipeline, device_name
from omni_actors.config.placement import devices_by_replica, gpus_of_replica, host_devices, memory_plan, shared_devices
from omni_actors.config.schema import PipelineConfig, StageConfig
from omni_actors.config.yaml_reader import Document, Place
from omni_actors.errors import ConfigError, suggest
from omni_actors.host.run_directory import expanded


def describe(loaded: LoadedConfig, devices: int | None = None) -> str:
    """List the effective configuration, one value per line with its source, then placement and memory plan."""
    devices = host_devices() if devices is None else devices
    pipeline = loaded.pipeline
    flat = {
        key: value
        for key, value in flatten(msgspec.to_builtins(pipeline)).items()
        if value is not None or key in loaded.sources
    }
    width = max(len(key) for key in flat)
    shown = {key: msgspec.json.encode(value).decode() for key, value in flat.items()}
    value_width = min(60, max(len(text) for text in shown.values()))
    lines = [f"pipeline {pipeline.name} ({loaded.path}), configuration {pipeline.digest()}"]
    lines += [
        f"  {key:<{width}}  {text:<{value_width}}  [{_source_of(key, loaded.sources)}]" for key, text in shown.items()
    ]
    lines.append("placement")
    for stage in pipeline.stages:
        taken = set(itertools.chain.from_iterable(devices_by_replica(stage, devices)))
        where = ", ".join(f"GPU {device}" for device in sorted(taken)) or "CPU"
        if stage.executor == "ray":
            where = f"{gpus_of_replica(stage)} x GPU of the Ray cluster, each with its process on a CPU"
        if pipeline.cluster.nnodes > 1:
            where += f" of node {', '.join(str(rank) for rank in stage.nodes)}"
        spares = f" and {stage.spares} spare{'s' if stage.spares > 1 else ''}" if stage.spares else ""
        lines.append(
            f"  {stage.name}: {stage.replicas} x {stage.kind}{spares} on {where}, takes input from "
            f"{', '.join(stage.source_names) or 'the client'}"
        )
    cluster = pipeline.cluster
    if cluster.nnodes > 1:
        master = f"tcp://{cluster.master_addr}:{cluster.master_port}"
        lines.append(f"node {cluster.node_rank} of {cluster.nnodes}; the coordinator listens for nodes at {master}")
    for (rank, device), shares in memory_plan(pipeline, devices).items():
        total = sum(share for _, share in shares)
        name = device_name(pipeline, rank, device)
        lines.append(f"memory of {name}: " + " + ".join(f"{n} {s:g}" for n, s in shares) + f" = {total:.2f}")
    for device, replicas in shared_devices(pipeline, cluster.node_rank, devices).items():
        how = "under CUDA MPS, where that works" if pipeline.mps == "auto" else "in turns (mps: off)"
        lines.append(f"GPU {device} is shared, {how}: {', '.join(f'{stage}/{index}' for stage, index in replicas)}")
    return "\n".join(lines)


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a key, or of the mapping that holds it."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return "default"


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of msgspec's path, such as $.stages[1].kind
_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_UNKNOWN_VALUE = re.compile(r"Invalid enum value '?(.*?)'?", re.DOTALL)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


class LoadedConfig(NamedTuple):
    """A checked pipeline and the source of each of its values, by dotted key."""

    pipeline: PipelineConfig
    sources: dict[str, str]
    path: Path


def load(path: str | Path, overrides: Mapping[str, str] | None = None, devices: int | None = None) -> LoadedConfig:
    """Read a pipeline, apply overrides and check it.

    Args:
        path: the YAML file, or the name of one that comes with the package.
        overrides: command-line values by dotted key, for instance `{"stages.thinker.engine.max_num_seqs": "8"}`.
        devices: number of GPUs of this host; `None` counts them.

    Raises:
        ConfigError: anything is wrong; it names the key and, for an unknown one, the nearest valid key.
    """
    path = find_config(path)
    document = yaml_reader.read_file(path)
    data = document.value
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with the keys name, model and stages.")
    sources = {key: f"yaml {path.name}" for key in flatten(data)}
    from_env = envs.config_overrides()
    from_slurm = slurm_overrides(known={*from_env, *(overrides or {})})
    for kind, found in (("SLURM", from_slurm), ("env", from_env)):
        for key, (text, variable) in found.items():
            _set_value(data, key, as_yaml(key, text), sources, f"{kind} {variable}")
    for key, text in (overrides or {}).items():
        _set_value(data, key, text, sources, "command line")
    if data.get("mps") is False:
        data["mps"] = "off"  # which YAML reads as false
    pipeline = _converted(data, _Places(path.name, document, data, sources))
    pipeline = msgspec.structs.replace(
        pipeline,
        model=_resolve_model(pipeline.model, path.parent, "model"),
        stages=[_with_model(stage, path.parent) for stage in _in_graph_order(pipeline.stages)],
    )

    def path_of(key: str, given: str) -> Path:
        """The absolute path of a value: one of the YAML is relative to the YAML's folder."""
        return expanded(given, key, path.parent if sources.get(key, "").startswith("yaml") else None)

    coordinator, template = pipeline.coordinator, pipeline.tool_chat_template
    if coordinator.keys_dir is not None:
        folder = path_of("coordinator.keys_dir", coordinator.keys_dir)
        coordinator = msgspec.structs.replace(coordinator, keys_dir=str(folder))
    if template is not None:
        template = str(path_of("tool_chat_template", template))
    adapters = {
        name: _adapter_folder(name, folder, path_of(f"adapters.{name}", folder))
        for name, folder in pipeline.adapters.items()
    }
    pipeline = msgspec.structs.replace(
        pipeline, coordinator=coordinator, tool_chat_template=template, adapters=adapters
    )
    check_pipeline(pipeline, host_devices() if devices is None else devices)
    return LoadedConfig(pipeline, sources, path)


class _Places(NamedTuple):
    """Finds where a value comes from, for errors."""

    file: str
    document: Document
    data: dict[str, Any]
    sources: dict[str, str]

    def __call__(self, place: Place) -> str:
        """A phrase on the source of the value at `place`: its line in the YAML, or what has replaced it."""
        key = dotted(self.data, place)
        if (source := self.sources.get(key)) is not None and not source.startswith("yaml"):
            return source
        line = self.document.line(place)
        return self.file if line is None else f"{self.file}, line {line}"


def _converted(data: dict[str, Any], places: _Places) -> PipelineConfig:
    """Convert plain values to the schema. Raises `ConfigError` with the dotted key and its place."""
    try:
        return msgspec.convert(data, PipelineConfig, strict=True)
    except ValidationError as error:
        place, problem = explain(error, PipelineConfig)
        key = dotted(data, place)
        raise ConfigError(f"{places(place)}: {f'{key}: ' if key else ''}{problem}") from error


StructT = TypeVar("StructT", bound=Struct)


def engine_options(stage: StageConfig, struct: type[StructT]) -> StructT:
    """Read a stage's `engine` mapping. Raises `ConfigError` for an unknown option or a wrong type."""
    return converted(stage.engine, struct, f"stages.{stage.name}.engine")


def converted(data: Any, struct: type[StructT], key: str) -> StructT:
    """Convert a section of a configuration, which has a dotted key. Raises `ConfigError` with the key at fault."""
    try:
        return msgspec.convert(data, struct, strict=True)
    except ValidationError as error:
        place, problem = explain(error, struct)
        raise ConfigError(f"{'.'.join(map(str, (key, *place)))}: {problem}") from error


def explain(error: ValidationError, struct: type[Struct]) -> tuple[Place, str]:
    """Return where msgspec's conversion to `struct` failed, and why, with the nearest word that is possible there."""
    problem, _, path = str(error).partition(" - at `")
    place: Place = tuple(int(index) if index else name for name, index in _STEP.findall(path))
    words: list[str] = []
    for kind in types_at(place, struct):
        if isinstance(kind, str):  # of a `Literal`
            words.append(kind)
        elif is_struct(kind):  # with the fields of sections: `temperature` is below `sampling`
            for name, annotation in fields_of(kind).items():
                below = [key for part in _parts(annotation) if is_struct(part) for key in fields_of(part)]
                words += [name, *(f"{name}.{key}" for key in below)]
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            words += [str(member.value) for member in kind]
    if found := _UNKNOWN_KEY.fullmatch(problem):
        return (*place, found[1]), f"unknown key.{suggest(found[1], words)}"
    if found := _UNKNOWN_VALUE.fullmatch(problem):
        return place, f"there is no {found[1]!r} here.{suggest(found[1], words)}"
    return place, f"{problem}."


def types_at(place: Iterable[str | int], kind: Any) -> list[Any]:
    """All types in the annotation at a place, with the values of a `Literal`. A list has those of its items, too."""
    kinds = [*_parts(kind)]
    for step in place:
        if isinstance(step, str):
            found = [fields_of(kind)[step] for kind in kinds if is_struct(kind) and step in fields_of(kind)]
            kinds = [part for annotation in found for part in _parts(annotation)]
    return kinds


@functools.cache  # to evaluate the annotations takes milliseconds
def fields_of(struct: type[Struct]) -> dict[str, Any]:
    """The annotations of a struct's fields and of its tag, by the names that they have in YAML or JSON."""
    hints, config = get_type_hints(struct, include_extras=True), struct.__struct_config__
    named = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    tag = {config.tag_field: Literal[config.tag]} if config.tag_field is not None else {}
    return {**tag, **{encoded: hints[name] for name, encoded in named}}


def is_struct(kind: Any) -> TypeGuard[type[Struct]]:
    """Whether a type is that of structs."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def _parts(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for argument in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        yield from _parts(argument)


def dotted(data: Any, place: Place) -> str:
    """The dotted key of the value to which keys and indices lead; stages by their names."""
    keys: list[str] = []
    for step in place:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):  # it is missing, which may be the error to be reported
            data = None
        named = isinstance(step, int) and isinstance(data, dict) and isinstance(data.get("name"), str)
        keys.append(data["name"] if named else str(step))
    return ".".join(keys)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; items of a list are addressed by their name if they have one."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value)
    ):
        value = {item["name"]: item for item in value}
    elif not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat or {prefix: {}}


def as_yaml(key: str, text: str) -> str:
    """Quote what is given for a key that has a text, as YAML has a meaning for `~`, ` #` and `: `; else it is YAML."""
    takes_text = not {int, float, bool, list, dict} & set(types_at(tuple(key.split(".")), PipelineConfig))
    return json.dumps(text, ensure_ascii=False) if takes_text else text


def _set_value(data: dict[str, Any], key: str, text: str, sources: dict[str, str], source: str) -> None:
    """Set the dotted `key` to a value in YAML. Stages are addressed by name: `stages.thinker.replicas`."""
    node: Any = data
    parts = key.split(".")
    if len(parts) > yaml_reader.MAX_DEPTH:
        raise ConfigError(f"{source}: the key {key[:80]!r}... has more than {yaml_reader.MAX_DEPTH} levels.")
    for index, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = _stage_by_name(node, part, key)
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise ConfigError(f"{source}: {'.'.join(parts[: index + 1])!r} is not a mapping, so {key!r} cannot be set.")
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {key!r} does not name a value.")
    node[parts[-1]] = yaml_reader.read(text, f"{source}: the value of {key!r}").value
    for old in [old for old in sources if old == key or old.startswith(f"{key}.")]:
        del sources[old]
    sources[key] = source


def _stage_by_name(stages: list[Any], name: str, key: str) -> Any:
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)]
    if name not in names:
        raise ConfigError(f"{key!r}: there is no stage {name!r}.{suggest(name, [str(known) for known in names])}")
    return next(stage for stage in stages if isinstance(stage, dict) and stage.get("name") == name)


def _with_model(stage: StageConfig, base: Path) -> StageConfig:
    if stage.model is None:
        return stage
    return msgspec.structs.replace(stage, model=_resolve_model(stage.model, base, f"stages.{stage.name}.model"))


def _resolve_model(model: str, base: Path, where: str) -> str:
    """Resolve a path relative to the YAML file or the current folder; anything else is taken for a hub name."""
    for folder in (expanded(model, where, base), expanded(model, where)):
        if folder.is_dir():
            return str(folder.resolve())
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"{where}: there is no folder {model!r} (looked next to the YAML file and in the current folder).",
            hint="Give the folder of a checkpoint, or make a tiny one: python -m tools.checkpoints tiny DIR.",
        )
    return model


def _adapter_folder(name: str, given: str, folder: Path) -> str:
    """The folder of a LoRA adapter. Raises `ConfigError` if there is none."""
    if not folder.is_dir():
        raise ConfigError(
            f"adapters.{name}: there is no folder {given!r}.",
            hint="Name a folder in which PEFT or diffusers saved one.",
        )
    return str(folder.resolve())


def _in_graph_order(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Order the stages, each after its sources. Raises `ConfigError` for repeated or missing names and for cycles."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two stages are called {name!r}; stage names must differ.")
    for stage in stages:
        for source in stage.source_names:
            if source not in names:
                raise ConfigError(
                    f"stages.{stage.name}.inputs.from: there is no stage {source!r}.{suggest(source, names)}"
                )
    try:
        order = [*graphlib.TopologicalSorter({stage.name: stage.source_names for stage in stages}).static_order()]
    except graphlib.CycleError as error:
        raise ConfigError(f"The inputs of stages form a cycle: {' -> '.join(error.args[1])}.") from error
    return sorted(stages, key=lambda stage: order.index(stage.name))


# -- configurations that come with the package ------------------------------------------------------------------------

SHIPPED = Path(__file__).resolve().parents[1] / "stage_configs"
SUFFIX = ".yaml"


def shipped() -> list[str]:
    """Names of the configurations, sorted."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{SUFFIX}"))


def find_config(given: str | Path) -> Path:
    """Return the file that a path or a name stands for; a file or folder of that path comes first.

    Raises:
        ConfigError: there is neither a file nor a configuration of that name.
    """
    path = Path(given)
    if "\0" in str(given):
        raise ConfigError(f"Cannot read the pipeline file {str(given)!r}: the name holds a NUL character.")
    try:
        if path.exists():
            return path
    except OSError as error:  # the name is too long
        raise ConfigError(f"Cannot read the pipeline file {path}: {error.strerror}.") from error
    name = path.name.removesuffix(SUFFIX)
    if name in shipped() and str(path.parent) in (".", "stage_configs"):
        return SHIPPED.resolve() / f"{name}{SUFFIX}"
    raise ConfigError(
        f"Cannot read the pipeline file {path}: No such file or directory.{suggest(name, shipped())}",
        hint=f"Give a file, or the name of a configuration that comes with omni_actors: {', '.join(shipped())}.",
    )


# -- SLURM ------------------------------------------------------------------------------------------------------------

SCONTROL_SECONDS = 10.0


def slurm_overrides(
    environ: Mapping[str, str] | None = None, known: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the configuration values that SLURM sets: key -> (value, variable). Empty unless a job has several nodes.

    Args:
        known: keys already set by a source of higher precedence.

    Raises:
        ConfigError: the first host is not configured and cannot be found from SLURM.
    """
    environ = os.environ if environ is None else environ
    nodes = environ.get("SLURM_NNODES", "")
    if not nodes.isdecimal() or int(nodes) < 2:
        return {}
    overrides = {"cluster.nnodes": (nodes, "SLURM_NNODES")}
    if "SLURM_NODEID" in environ:
        overrides["cluster.node_rank"] = environ["SLURM_NODEID"], "SLURM_NODEID"
    hosts = environ.get("SLURM_JOB_NODELIST")
    if hosts and "cluster.master_addr" not in known:
        overrides["cluster.master_addr"] = _first_host(hosts), "SLURM_JOB_NODELIST"
    return {key: value for key, value in overrides.items() if key not in known}


def _first_host(hosts: str) -> str:
    """Expand SLURM's notation, which only SLURM knows: the first host of `node[3-4,9]` is `node3`."""
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SCONTROL_SECONDS)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {hosts!r}, but scontrol cannot expand it: {error}.",
            hint="Unset it, and give --master-addr.",
        ) from error
