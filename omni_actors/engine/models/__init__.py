"""Models: the registry, and a folder for each model family.

The registry says which module serves which stage of which checkpoint. Modules are imported only when used.
Models of other packages are added by `plugins` in the YAML (`load_plugins`); docs/extending.md shows an example.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from omni_actors.config import check_allowed
from omni_actors.config.checkpoint import CONFIG_NAME, INDEX_NAME, checkpoint_class
from omni_actors.errors import ConfigError
from omni_actors.protocol.payloads import StageParams

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

Overrides: TypeAlias = "Callable[[PretrainedConfig], PretrainedConfig]"
ModelKind = Literal["autoregressive", "encoder", "diffusion", "prompt"]


@dataclass(frozen=True)
class PromptMedia:
    """What the prompt stage must know of a model's media.

    Args:
        positions_per_second: of the checkpoint's configuration, how many time positions a second of video has; `None`
            for a model whose positions do not tell the time.
        min_audio_samples: at 16 kHz; with fewer, the audio encoder has no frame to encode.
        audio_window: of the checkpoint's configuration, how many frames of audio the encoder encodes together.
        audio_embeddings: number of embeddings that the encoder makes of n frames.
    """

    positions_per_second: Callable[[PretrainedConfig], int] | None
    min_audio_samples: int
    audio_window: Callable[[PretrainedConfig], int]
    audio_embeddings: Callable[[int], int]


class SpeechLimit(NamedTuple):
    """The longest speech of a text, in tokens of the talker: `base`, and `per_token` for each token of the text.

    A talker that goes on longer has lost the text and would speak until `max_tokens`.
    """

    base: int
    per_token: int


@dataclass(frozen=True)
class ModelSpec:
    """How vLLM runs one stage of a checkpoint.

    Args:
        kind: the engine that runs it.
        hf_overrides: turns the checkpoint's configuration into the one vLLM sees for this stage.
        vllm_models: architecture name -> class object. With a class *object* vLLM need not start a subprocess that
            imports all of vLLM (8-10 s) to inspect the class.
        engine: vLLM EngineArgs that suit this model; the user's settings override them.
        required: EngineArgs without which the model gives wrong results; the user's settings must agree with them.
        params: sampling defaults of the published model.
        steps_per_schedule: how many decode steps one scheduling stands for unless the user says otherwise; None if the
            model takes one at a time, because its `EmittingState` does or because its tokens are read as they come.
        speech_limit: of a talker, after how much speech a request ends as at `max_tokens`. A request's `min_tokens` and
            `ignore_eos` go before it.
        adapter: class path of the `AutoregressiveAdapter` or `EncoderAdapter` that maps stage inputs to vLLM requests.
        runner: class path of the `DiffusionModelRunner` (diffusion stages).
        folder: of a checkpoint with a folder for each part, the one whose config.json vLLM reads. It must be one of a
            language model, also for stages that are none (`placeholder_overrides`). If the checkpoint has none, the
            absolute path of a folder that has.
        tokens_folder: that of the tokenizer, likewise.
        media: set if prompts may have audio, images and video (the thinker of an omni model).
        prompts: class path of the `TextPromptProcessor` of prompt stages that read prompts in their own way. It is made
            of the stage's arguments, vLLM's configuration for them, and the limits for media.
    """

    kind: ModelKind
    hf_overrides: Overrides
    vllm_models: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    params: StageParams = field(default_factory=StageParams)
    steps_per_schedule: int | None = None
    speech_limit: SpeechLimit | None = None
    adapter: str = ""
    runner: str = ""
    folder: str = ""
    tokens_folder: str = "tokenizer"
    media: PromptMedia | None = None
    prompts: str = ""


def served_as(architecture: str, part: str) -> Callable[[Overrides], Overrides]:
    """Decorate what makes a stage's configuration of the checkpoint's: the result names an architecture of ours.

    vLLM first calls `hf_overrides` with an empty configuration, and later with their result; both are left as they are.

    Args:
        architecture: registered as a class object.
        part: attribute by which the checkpoint's real configuration is recognised.
    """

    def decorate(change: Overrides) -> Overrides:
        def override(config: PretrainedConfig) -> PretrainedConfig:
            if not hasattr(config, part) or config.architectures == [architecture]:
                return config
            made = change(config)
            made.architectures = [architecture]
            return made

        return override

    return decorate


def renamed(architecture: str, part: str) -> Overrides:
    """`hf_overrides` that name an architecture of ours and change nothing else; see `served_as`."""
    return served_as(architecture, part)(lambda config: config)


# The module of each stage.
_SPEECH = {stage: stage for stage in ("talker", "code2wav")}
_OMNI = {"thinker": "thinker", **_SPEECH}
_PICTURES = {"text_encoder": "text_encoder_stage", "dit": "stages", "vae": "stages"}
_EDITING = {**_PICTURES, "prompt": "texts", "text_encoder": "texts", "vae_encoder": "stages"}
_FAMILIES = {  # architecture, or pipeline of diffusers -> folder and stages
    "Qwen2_5OmniModel": ("qwen2_5_omni", _OMNI),  # as published
    "Qwen2_5OmniForConditionalGeneration": ("qwen2_5_omni", _OMNI),  # as transformers saves it
    "Qwen3OmniMoeForConditionalGeneration": ("qwen3_omni", _OMNI),
    "Qwen3TTSForConditionalGeneration": ("qwen3_tts", _SPEECH),
    "Qwen3ASRForConditionalGeneration": ("qwen3_asr", {"thinker": "thinker", "aligner": "aligner"}),
    "MiniCPMO": ("minicpm_o", _OMNI),
    "CosyVoice2Model": ("cosyvoice2", _SPEECH),
    "ZImagePipeline": ("z_image", _PICTURES),
    "QwenImage21Pipeline": ("qwen_image", _EDITING),
    "Flux2KleinPipeline": ("flux2", _EDITING),
}
MODULES: dict[tuple[str, str], str] = {
    (architecture, stage): f"omni_actors.engine.models.{family}.{module}"
    for architecture, (family, stages) in _FAMILIES.items()
    for stage, module in stages.items()
}

PROMPT_STAGE = "prompt"
CHAT_STAGE = "thinker"
# Any chat model that vLLM serves, in place of the thinker. vLLM finds its class by the architecture that is published.
CHAT = ModelSpec(
    kind="autoregressive",
    hf_overrides=lambda config: config,
    engine={"enable_prefix_caching": True},
    required={"enable_prompt_embeds": False},
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.adapter.TextAdapter",
)


def is_chat_model(architecture: str) -> bool:
    """Whether vLLM serves an architecture that no module here is made for: as the thinker, text in and text out."""
    from vllm.model_executor.models.registry import ModelRegistry

    ours = any(name == architecture for name, _ in MODULES)
    return not ours and architecture in ModelRegistry.get_supported_archs()


def load_plugins(names: Iterable[str]) -> None:
    """Add the models of plugin modules to the registry. Loading a plugin twice changes nothing.

    A plugin has `MODELS`: (architecture of the checkpoint, stage) -> name of a module whose `SPEC` is a `ModelSpec`, or
    one for each stage by name.

    Raises:
        ConfigError: the name is outside the allowed prefixes, the module does not exist, `MODELS` is malformed, or
            another module already serves the model.
    """
    for name in names:
        check_allowed(name, "plugins")
        try:
            models = importlib.import_module(name).MODELS
        except Exception as error:  # third-party code may raise anything
            raise ConfigError(f"plugins: cannot load {name!r}: {type(error).__name__}: {error}.") from error
        for key, module in _checked_models(name, models):
            check_allowed(module, f"plugins: {name}.MODELS")
            if MODULES.setdefault(key, module) != module:
                raise ConfigError(
                    f"plugins: {name}.MODELS: {key[1]!r} of {key[0]!r} is already served by {MODULES[key]}."
                )


def _checked_models(plugin: str, models: object) -> Iterable[tuple[tuple[str, str], str]]:
    if not isinstance(models, Mapping):
        raise ConfigError(f"plugins: {plugin}.MODELS must be a mapping, it is {type(models).__name__}.")
    for key, module in models.items():
        pair = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key)
        if not pair or not isinstance(module, str):
            raise ConfigError(
                f"plugins: {plugin}.MODELS maps (architecture, stage) to the name of a module; got {key!r}: {module!r}."
            )
    return models.items()


def find_model_spec(architecture: str, model_stage: str) -> ModelSpec:
    """The `SPEC` of the module that serves `model_stage` of `architecture`.

    Raises:
        ConfigError: the registry has no such architecture or stage; the message lists what it has.
    """
    module = MODULES.get((architecture, model_stage))
    if module is None and model_stage == CHAT_STAGE and is_chat_model(architecture):
        return CHAT
    if module is None:
        stages = sorted(stage for name, stage in MODULES if name == architecture)
        known = f"its stages are {stages}" if stages else f"known are {sorted({name for name, _ in MODULES})}"
        raise ConfigError(
            f"No model serves the stage {model_stage!r} of {architecture!r}; {known}.",
            hint="A text model that vLLM serves needs a stage 'thinker'; add other models with `plugins` in the YAML "
            "(docs/extending.md).",
        )
    try:
        spec = importlib.import_module(module).SPEC
        spec = spec.get(model_stage) if isinstance(spec, Mapping) else spec
    except AttributeError as error:
        raise ConfigError(f"{module} has no SPEC.") from error
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"{module}.SPEC is not a ModelSpec.")
    return spec


def prompted_stage(architecture: str) -> str:
    """The stage whose module says how a prompt stage reads prompts: its own, or that of the thinker that takes them."""
    return PROMPT_STAGE if (architecture, PROMPT_STAGE) in MODULES else CHAT_STAGE


def register_models(spec: ModelSpec) -> None:
    """Register the classes of a model with vLLM in this process. Idempotent."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture, model_class in spec.vllm_models.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, model_class)


def checkpoint_architecture(model: str) -> str:
    """The architecture named by a checkpoint's config.json, or the pipeline named by its model_index.json.

    Args:
        model: folder, or hub name of a checkpoint.

    Raises:
        ConfigError: the file cannot be read or is not what it should be.
    """
    return checkpoint_class(Path(model) if Path(model).is_dir() else _cached_folder(model))


def _cached_folder(model: str) -> Path:
    from transformers.utils import cached_file

    for name in (INDEX_NAME, CONFIG_NAME):
        try:
            found = cached_file(model, name, _raise_exceptions_for_missing_entries=name == CONFIG_NAME)
        except OSError as error:  # neither cached nor to be had from the hub
            raise ConfigError(f"Cannot read the configuration of {model!r}: {error}") from error
        if found is not None:
            return Path(found).parent
    raise ConfigError(f"The checkpoint {model!r} has neither {INDEX_NAME} nor {CONFIG_NAME}.")
