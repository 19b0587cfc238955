"""The thinker of Qwen3-Omni in a real vLLM engine core, against transformers: text, media, what is spoken."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.prompt import PromptEngine
from omni_actors.engine.rows import to_host, to_torch
from omni_actors.engine.workers.gpu import experts_of
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor, TensorRef
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.stage.engine_interface import ErrorEvent, StageInputs, StageRequest
from omni_actors.telemetry import metrics as table
from tests.support.qwen3_reference import Qwen3Result
from tests.support.stage_driver import encode_media_prompt, make_engine
from tools.checkpoints.omni import QWEN3_OMNI

TINY = QWEN3_OMNI.tiny
pytestmark = pytest.mark.e2e

RANDOM = np.random.default_rng(0)
SPEECH = (RANDOM.standard_normal(48_000) * 0.1).astype(np.float32)  # 3 s: two windows of the encoder
ODD = (RANDOM.standard_normal(20_011) * 0.1).astype(np.float32)  # no whole number of frames
PICTURE = Image.fromarray(RANDOM.integers(0, 256, (96, 128, 3), dtype=np.uint8))
CLIP = RANDOM.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)  # 4 s, at transformers' one frame per second
REPLY = 20

MEDIA: dict[str, dict[str, Any]] = {
    "text": {},
    "other text": {},
    "audio": {"audio": SPEECH},
    "odd audio": {"audio": ODD},
    "image": {"image": PICTURE},
    "late image": {"image": PICTURE},
    "video": {"video": CLIP},
    "audio and image": {"audio": SPEECH, "image": PICTURE},
    "audio in video": {"audio": SPEECH, "video": CLIP},
}
TEXTS = {"other text": "Tell me a story about a dog and a cat who sail the sea. " * 3}


@dataclass(frozen=True)
class Case:
    """A prompt as the thinker gets it, and what transformers answers."""

    inputs: StageInputs
    answer: Qwen3Result
    positions: torch.Tensor
    """[3, P] as transformers' talker counts them: it is given no `use_audio_in_video`."""


@pytest.fixture(scope="module")
def cases(qwen3_reference, tiny_qwen3_checkpoint):
    def make(name: str, media: dict[str, Any]) -> Case:
        together = {"use_audio_in_video": True} if name == "audio in video" else {}
        shown = [kind for kind in media if not together or kind == "video"]
        parts = [{"type": kind} for kind in shown] + [{"type": "text", "text": TEXTS.get(name, "What is this?")}]
        before = [{"role": "system", "content": "Look closely at it. " * 6}] if name.startswith("late") else []
        text = qwen3_reference.prompt([*before, {"role": "user", "content": parts}])
        given = {f"{kind}s": [item] for kind, item in media.items()}
        inputs = qwen3_reference.inputs(text, **given, **together)
        answer = qwen3_reference.generate(inputs, thinker_max_tokens=REPLY, thinker_eos=[], speaks=False, **together)
        positions = qwen3_reference.positions(inputs)
        if not media:
            return Case(StageInputs(token_ids=answer.prompt_token_ids), answer, positions)
        data = {kind: (item, 16_000) if kind == "audio" else item for kind, item in media.items()}
        return Case(encode_media_prompt(tiny_qwen3_checkpoint, text, data, **together), answer, positions)

    return {name: make(name, media) for name, media in MEDIA.items()}


@pytest.fixture
def thinker(driver, tiny_qwen3_checkpoint):
    return driver(tiny_qwen3_checkpoint, "thinker", asynchronous=True, max_model_len=1024)


def spoken(driver, name):
    """All ids that the talker gets, checked to be without gap or overlap, and the first event."""
    ids, events = [], driver.streams(name)
    for event in events:
        assert event.start == len(ids)
        ids += event.token_ids
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    return ids, events[0]


def check(driver, name, case, reply):
    """A request's answer is transformers', with everything that the talker gets."""
    answer = case.answer
    assert driver.written(name) == reply
    ids, first = spoken(driver, name)
    assert ids == [*answer.prompt_token_ids, *reply[:-1]]
    assert first.scalars == {"prompt_tokens": len(answer.prompt_token_ids)}
    assert len(first.token_ids) >= len(answer.prompt_token_ids), "the prompt comes as a whole"
    if len(answer.media_rows):
        torch.testing.assert_close(to_torch(first.tensors["media_rows"]), answer.media_rows, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(to_torch(first.tensors["mrope_positions"]), case.positions, atol=0, rtol=0)
    else:
        assert not first.tensors


def test_every_kind_of_prompt_equals_transformers_in_one_batch(thinker, cases):
    names = list(cases)

    def join(_step: int) -> None:
        if names:
            name = names.pop(0)
            thinker.start(name, cases[name].inputs, max_tokens=REPLY)

    join(0)
    thinker.run(join)
    for name, case in cases.items():
        assert list(case.inputs.token_ids) == case.answer.prompt_token_ids, name
        check(thinker, name, case, case.answer.thinker_tokens)
        finished = thinker.finished(name)
        assert finished.reason is FinishReason.LENGTH
        assert finished.input_tokens == len(case.answer.prompt_token_ids)


def test_the_last_token_of_a_reply_is_not_spoken_however_it_ends(thinker, cases, qwen3_reference):
    """Before a stop string, speech ends where the text does."""
    case, decode = cases["text"], qwen3_reference.processor.tokenizer.decode
    reply = case.answer.thinker_tokens
    end, stop = reply.index(reply[5]) + 1, decode(reply[6:8])
    thinker.start("stopped", case.inputs, max_tokens=REPLY, stop_token_ids=(reply[5],))
    thinker.start("one", case.inputs, max_tokens=1)
    thinker.start("silent", case.inputs, max_tokens=REPLY, streams=False)
    thinker.start("string", case.inputs, max_tokens=REPLY, stop=(stop,))
    thinker.run()
    check(thinker, "stopped", case, reply[:end])
    assert thinker.finished("stopped").reason is FinishReason.STOP
    check(thinker, "one", case, reply[:1])
    assert not thinker.streams("silent")
    assert thinker.written("silent") == reply
    assert thinker.text("string") == decode(reply).partition(stop)[0]
    assert decode(spoken(thinker, "string")[0][len(case.answer.prompt_token_ids) :]) == thinker.text("string")


def test_a_text_that_is_spoken_reads_the_prefix_cache_and_media_that_are_spoken_do_not(thinker, cases):
    hits = {}
    for name in ("other text", "video"):
        for _ in range(2):
            before = thinker.engine.statistics()[table.VLLM_HITS]
            thinker.clear()
            thinker.start(name, cases[name].inputs, max_tokens=REPLY)
            thinker.run()
            check(thinker, name, cases[name], cases[name].answer.thinker_tokens)
            hits[name] = thinker.engine.statistics()[table.VLLM_HITS] - before
    assert hits["other text"] > 0
    assert hits["video"] == 0


def test_embeddings_are_refused_since_the_talker_looks_tokens_up(thinker, tiny_qwen3_checkpoint):
    with pytest.raises(ConfigError, match="enable_prompt_embeds must be False"):
        make_engine(tiny_qwen3_checkpoint, "thinker", enable_prompt_embeds=True)
    with pytest.raises(InvalidRequest, match="prompt_embeds: this stage takes none"):
        thinker.start("r", StageInputs(tensors={"prompt_embeds": to_host(torch.zeros(4, TINY["width"]))}), max_tokens=2)


@pytest.fixture(scope="module")
def prompts(tiny_qwen3_checkpoint):
    model = OmniModelConfig(str(tiny_qwen3_checkpoint), "thinker")
    engine = PromptEngine(OmniEngineArgs(model, "prompt", {"max_model_len": 1024, "dtype": "float32"}))
    yield engine
    engine.shutdown()


def prepared(prompts, kind, array, sound=None, **rates):
    """What the prompt stage makes of one medium, a video perhaps with its sound, and a question."""
    dtype = DType.U8 if array.dtype == np.uint8 else DType.F32
    tensors = [HostTensor(dtype, array.shape, array.tobytes())]
    media = [Media(kind, MediaEncoding.ARRAY, TensorRef(dtype, array.shape, 0), **rates)]
    if sound is not None:
        tensors.append(HostTensor(DType.F32, sound.shape, sound.tobytes()))
        media[0] = msgspec.structs.replace(media[0], sound=1)
        media.append(Media("audio", MediaEncoding.ARRAY, TensorRef(DType.F32, sound.shape, 1), sample_rate=16_000))
    message = ChatMessage("user", (ContentPart(media=0), ContentPart(text="What is this?")))
    prompt = Prompt(messages=(message,), media=tuple(media))
    prompts.start(StageRequest("r", StageParams(), 0), StageInputs(prompt=prompt, media=tensors))
    stream = prompts.step()[0]
    if isinstance(stream, ErrorEvent):
        raise stream.error
    return StageInputs(token_ids=stream.token_ids, tensors=stream.tensors)


@pytest.mark.parametrize(
    ("kind", "array", "sound"),
    [
        ("video", np.concatenate([CLIP, CLIP[:2]]), None),
        ("video", CLIP, SPEECH),
        ("audio", SPEECH[:320], None),
        ("audio", np.tile(SPEECH, 2)[:80_000], None),
    ],
    ids=["a video", "a video with its sound", "the shortest sound", "a sound of two and a half windows"],
)
def test_the_prompt_stage_prepares_what_transformers_does(kind, array, sound, prompts, thinker, qwen3_reference):
    """Times count 13 positions a second, and the sound of a video lies between its pictures."""
    content = [{"type": kind}, {"type": "text", "text": "What is this?"}]
    ours, theirs = ({"frames_per_second": 2.0}, {"fps": 2.0}) if kind == "video" else ({"sample_rate": 16_000}, {})
    together = {} if sound is None else {"use_audio_in_video": True}
    more = {} if sound is None else {"audios": [sound]}
    wanted = qwen3_reference.inputs(
        [{"role": "user", "content": content}], **{f"{kind}s": [array]}, **more, **theirs, **together
    )
    answer = qwen3_reference.generate(wanted, thinker_max_tokens=6, thinker_eos=[], speaks=False, **together)
    inputs = prepared(prompts, kind, array, sound, **ours)
    assert list(inputs.token_ids) == answer.prompt_token_ids
    thinker.start("r", inputs, max_tokens=6)
    thinker.run()
    check(thinker, "r", Case(inputs, answer, qwen3_reference.positions(wanted)), answer.thinker_tokens)


def test_a_shorter_sound_is_refused(prompts):
    with pytest.raises(InvalidRequest, match="shorter than 320 samples"):
        prepared(prompts, "audio", SPEECH[:319], sample_rate=16_000)
    assert prompts.counts() == {"requests": 0}


def changed(checkpoint, folder, change):
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_without_speech_parts_answers_in_text(driver, tiny_qwen3_checkpoint, tmp_path, cases):
    """Thinking and Captioner have the thinker alone."""

    def change(config):
        del config["talker_config"], config["code2wav_config"]
        config["enable_audio_output"] = False

    folder = changed(tiny_qwen3_checkpoint, tmp_path / "thinking", change)
    weights = load_file(folder / "model.safetensors")
    weights = {name: value for name, value in weights.items() if name.startswith("thinker.")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    alone = driver(folder, "thinker", max_model_len=1024)
    for name in ("text", "audio and image"):
        alone.start(name, cases[name].inputs, max_tokens=REPLY, streams=False)
    alone.run()
    for name in ("text", "audio and image"):
        assert alone.written(name) == cases[name].answer.thinker_tokens


@pytest.mark.parametrize("layer", [TINY["states_layer"] - 1, TINY["layers"]])
def test_a_layer_that_gives_the_talker_other_states_is_refused(layer, tiny_qwen3_checkpoint, tmp_path):
    def change(config):
        config["talker_config"]["accept_hidden_layer"] = layer

    with pytest.raises(ConfigError, match=f"states of layer {layer}.*accept_hidden_layer"):
        make_engine(changed(tiny_qwen3_checkpoint, tmp_path / "odd", change), "thinker")


def test_rows_of_prompts_that_are_computed_in_pieces_and_preempted_come_once(tight, tiny_qwen3_checkpoint, cases):
    small = tight("thinker", tiny_qwen3_checkpoint, blocks=8, max_model_len=192)
    names = ("audio and image", "late image", "image", "text", "image", "image")
    for number, name in enumerate(names):
        small.start(f"r{number}", cases[name].inputs, max_tokens=REPLY)
    small.run()
    assert small.preempted
    for number, name in enumerate(names):
        check(small, f"r{number}", cases[name], cases[name].answer.thinker_tokens)


def test_the_experts_whose_kernels_a_start_compiles_are_found(thinker):
    kinds = experts_of(thinker.engine.core.worker.get_model())
    assert [(kind.w13[0], kind.chosen, kind.quantisation) for kind in kinds] == [
        (TINY["experts"], TINY["chosen"], "float32")
    ]
