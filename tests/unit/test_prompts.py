"""What users pass as a prompt becomes a message, or an error that names the field."""

from __future__ import annotations

import array
import json
from typing import Any

import numpy
import pytest
import torch

from omni_actors.client.prompts import to_params, to_prompt
from omni_actors.errors import Fault, InvalidRequest, OmniError
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.fields import DType, HostTensor, pack_token_ids
from omni_actors.protocol.payloads import AdditionalInformationPayload, Prompt, ToolCall

PICTURE = numpy.zeros((2, 2, 3), numpy.uint8)
SOUND = (numpy.zeros(8, numpy.float32), 16_000)
FILM = (numpy.zeros((2, 2, 2, 3), numpy.uint8), 2.0)
ROWS = numpy.arange(6, dtype=numpy.float32).reshape(3, 2)


def convert(prompt: Any, **given: Any) -> tuple[Prompt, AdditionalInformationPayload, BufferList]:
    buffers = BufferList()
    media = [given.get(name, ()) for name in ("audios", "images", "videos")]
    converted, information = to_prompt(prompt, *media, given.get("additional_information"), buffers)
    return converted, information, buffers


def embeds_of(value: Any) -> HostTensor:
    prompt, _, buffers = convert({"prompt_embeds": value})
    ref = prompt.embeds.tensor
    return HostTensor(ref.dtype, ref.shape, buffers.buffers[ref.buffer])


def information_of(values: dict[str, Any]) -> dict[str, Any]:
    _, information, buffers = convert("x", additional_information=values)
    return information.values(lambda ref: HostTensor(ref.dtype, ref.shape, buffers.buffers[ref.buffer]))


MESSAGE = {"role": "user", "content": "x"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
REFUSED = [  # prompt, and what the error and its hint say
    ({"prompt_token_id": [1]}, "'prompt_token_id'", "'prompt_token_ids'"),
    ({"prompt_token_ids": [1], "multimodal_data": {}}, "'multimodal_data'", "'multi_modal_data'"),
    ({"prompt_token_ids": [1], "cache_salt": "x"}, "'cache_salt'", "prompt_token_ids"),
    ({"prompt": "x"}, "'prompt'", "Pass a text as it is"),
    ({"prompt_token_ids": [1], "tensors": {}}, "'tensors'", "StageLLM"),
    ({"prompt_token_ids": [1], "multi_modal_data": {"images": PICTURE}}, "'images'", "'image'"),
    ([{**MESSAGE, "contents": "x"}], "'contents'", "'content'"),
    ([{"role": "user", "content": [{"type": "text", "txt": "x"}]}], "'txt'", "'text'"),
    ([{"role": "user", "content": [{"type": "image", "image": PICTURE, "detail": "low"}]}], "'detail'", "image"),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": b""}]}], "'input_audio'", "'audio'"),
    ([{"role": "user"}], "role, a text, and content"),
    ([{"role": 5, "content": "x"}], "role, a text, and content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "needs its data under the key 'text'"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "must be a string; got int"),
    ({"messages": [MESSAGE], "prompt_token_ids": [1]}, "either messages"),
    ({"messages": [MESSAGE], "multi_modal_data": {"image": PICTURE}}, "hold their media themselves"),
    ({"messages": "x"}, "list of chat messages"),
    ({"multi_modal_data": {"image": PICTURE}}, "exactly one of messages and token_ids, and not an empty one"),
    ({"prompt_token_ids": [1], "multi_modal_data": [PICTURE]}, "multi_modal_data must be a mapping"),
    ({"prompt_token_ids": ["a"]}, "32-bit integers"),
    ({"prompt_embeds": ROWS, "multi_modal_data": {"image": PICTURE}}, "cannot go with messages or media"),
    ({"prompt_embeds": ROWS, "prompt_token_ids": [1]}, "have 3 positions, but there are 1"),
    ({"prompt_embeds": ROWS[0]}, "shape [positions, width]; got [2]"),
    ({"prompt_embeds": ROWS[:0]}, "shape [positions, width]; got [0, 2]"),
    ({"prompt_embeds": ROWS.astype(float)}, "prompt_embeds has the dtype float64"),
    ({"prompt_embeds": ROWS.astype(numpy.int32)}, "must be float32, float16 or bfloat16; got i32"),
    ({"prompt_embeds": numpy.full((1, 2), numpy.nan, numpy.float32)}, "NaN or infinite"),
    ({"prompt_embeds": torch.full((1, 2), torch.inf, dtype=torch.bfloat16)}, "NaN or infinite"),
    ({"prompt_embeds": torch.full((1, 2), torch.nan, dtype=torch.bfloat16)}, "NaN or infinite"),
    ({"prompt_embeds": "x"}, "prompt_embeds has the dtype str"),
    *(
        ({"messages": [MESSAGE], **tools}, "tools")
        for tools in (
            {"tools": [FUNCTION], "tool_choice": "often"},
            {"tools": [FUNCTION] * 129},
            {"tool_choice": "auto", "prompt_token_ids": [1], "messages": None},
        )
    ),
    *(
        ({"messages": [MESSAGE], "additional_information": given}, words)
        for given, words in (
            ([1], "must be a mapping"),
            ({"": 1}, "a name has 1 to 128 characters"),
            ({5: 1}, "a name has 1 to 128 characters"),
            ({"a": None}, "additional_information['a'] must be a number, text"),
            ({"a": {"b": 1}}, "additional_information['a'] must be a number, text"),
            ({"a": [[1]]}, "additional_information['a'][0] must be a number or text; got list"),
            ({"a": numpy.zeros(1, bool)}, "additional_information['a'] has the dtype bool"),
            ({"a": 2**63}, "additional_information['a'] does not fit 64 bits"),
            ({"a": "x" * 65_537}, "additional_information['a'] has 65537 characters"),
            ({"a": [0] * 65_537}, "additional_information['a'] has 65537 items"),
            ({str(number): 1 for number in range(65)}, "has 65 entries; at most 64"),
        )
    ),
]


@pytest.mark.parametrize(("prompt", "words"), [(prompt, words) for prompt, *words in REFUSED])
def test_a_prompt_in_another_form_is_refused_with_its_field_and_the_nearest_known_one(
    prompt: Any, words: list[str]
) -> None:
    with pytest.raises(OmniError) as caught:
        convert(prompt)
    assert caught.value.fault is Fault.CALLER
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words)


def test_an_unknown_parameter_is_named_with_its_stage_and_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequest, match="stage 'thinker'") as caught:
        to_params({"thinker": {"temprature": 0.5}})
    assert "there is no 'temprature'. Did you mean 'temperature'?" in str(caught.value)


def test_token_ids_go_with_media_one_or_several_of_each_kind() -> None:
    data = {"image": [PICTURE, b"file"], "video": FILM, "audio": SOUND}
    prompt, _, buffers = convert({"prompt_token_ids": [5, 6], "multi_modal_data": data})
    assert prompt.token_ids == pack_token_ids([5, 6])
    assert [item.modality for item in prompt.media] == ["image", "image", "video", "audio"]
    assert [item.tensor.buffer for item in prompt.media] == [0, 1, 2, 3]
    assert bytes(buffers.buffers[1]) == b"file"
    as_arguments = convert({"prompt_token_ids": [5, 6]}, images=data["image"], videos=[FILM], audios=[SOUND])
    assert as_arguments[0] == prompt
    both = {"prompt_token_ids": [5], "multi_modal_data": {"image": PICTURE}}
    with pytest.raises(InvalidRequest, match="image is given twice"):
        convert(both, images=[PICTURE])
    assert len(convert(both, audios=[SOUND])[0].media) == 2


SOUNDED = (*FILM, SOUND)
USED = {"mm_processor_kwargs": {"use_audio_in_video": True}}


def test_a_video_brings_its_sound_in_every_form_of_a_prompt() -> None:
    parts = [{"type": "video", "video": SOUNDED}, {"type": "text", "text": "x"}]
    in_messages, _, buffers = convert([{"role": "user", "content": parts}])
    assert [(item.modality, item.sound) for item in in_messages.media] == [("audio", None), ("video", 0)]
    assert in_messages.messages[0].content[0].media == 1
    assert in_messages.sounds == {0}
    assert len(buffers.buffers) == 2
    assert convert("x", videos=[SOUNDED])[0] == in_messages
    assert convert({"messages": [{"role": "user", "content": parts}], **USED})[0] == in_messages
    in_tokens = convert({"prompt_token_ids": [5], "multi_modal_data": {"video": SOUNDED}})[0]
    assert in_tokens.media == in_messages.media
    as_vllm_takes_them = {"prompt_token_ids": [5], "multi_modal_data": {"video": FILM, "audio": SOUND}, **USED}
    assert convert(as_vllm_takes_them)[0] == in_tokens


@pytest.mark.parametrize(
    ("prompt", "given", "words"),
    [
        ("x", {"videos": [SOUNDED, FILM]}, "2 videos, 1 of them with a sound track"),
        ("x", {"videos": [SOUNDED], "audios": [SOUND]}, "2 sounds for the sound tracks of 1 videos"),
        ({"prompt_token_ids": [5], **USED}, {"videos": [FILM, FILM], "audios": [SOUND]}, "2 videos without a sound"),
        ({"prompt_token_ids": [5], **USED}, {"videos": [FILM]}, "1 videos without a sound track, and 0 audios"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": FILM}]}], **USED},
            {},
            "has no sound track",
        ),
        ({"messages": [MESSAGE], "mm_processor_kwargs": {"use_audio_in_video": "yes"}}, {}, "must be True or False"),
    ],
)
def test_sound_that_models_cannot_take_with_videos_is_refused_with_the_field(
    prompt: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(OmniError) as caught:
        convert(prompt, **given)
    assert words in caught.value.message
    assert caught.value.field == "use_audio_in_video"
    assert caught.value.fault is Fault.CALLER


def test_messages_may_be_a_mapping_to_which_more_is_added() -> None:
    prompt, information, _ = convert({"messages": [MESSAGE], "additional_information": {"style": "calm"}})
    assert prompt == convert([MESSAGE])[0]
    assert information.entries["style"].scalar == "calm"
    with pytest.raises(InvalidRequest, match="given twice"):
        convert({"messages": [MESSAGE], "additional_information": {}}, additional_information={})


def test_tools_go_with_messages_in_either_form() -> None:
    whole = {"messages": [MESSAGE], "tools": [{"type": "function", "function": FUNCTION}]}
    prompt, _, _ = convert(whole)
    assert [json.loads(text) for text in prompt.tools.definitions] == [FUNCTION]
    assert prompt.tools.choice == "auto"
    assert prompt.tools.parallel
    named = {"type": "function", "function": {"name": "weather"}}
    more = {"messages": [MESSAGE], "tools": [FUNCTION], "tool_choice": named, "parallel_tool_calls": False}
    prompt, _, _ = convert(more)
    assert prompt.tools.choice == "required"
    assert prompt.tools.name == "weather"
    assert not prompt.tools.parallel
    assert convert({"messages": [MESSAGE], "tools": []})[0].tools is None


def test_calls_and_their_results_are_messages() -> None:
    call = {"id": "call_1", "name": "weather", "arguments": "{}"}
    result = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    prompt, _, _ = convert([MESSAGE, {"role": "assistant", "content": "", "tool_calls": [call]}, result])
    assert prompt.messages[1].tool_calls == (ToolCall("call_1", "weather", "{}"),)
    assert prompt.messages[2].tool_call_id == "call_1"
    assert prompt.uses_tools
    assert not convert([MESSAGE])[0].uses_tools


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (ROWS, DType.F32),
        (ROWS.astype(">f4"), DType.F32),
        (numpy.asfortranarray(ROWS), DType.F32),
        (ROWS.astype(numpy.float16), DType.F16),
        (torch.from_numpy(ROWS).requires_grad_(), DType.F32),
        (torch.from_numpy(ROWS).T.contiguous().T, DType.F32),
        (torch.from_numpy(ROWS).half(), DType.F16),
        (torch.from_numpy(ROWS).bfloat16(), DType.BF16),
        (HostTensor(DType.BF16, (3, 2), torch.from_numpy(ROWS).bfloat16().view(torch.int16).numpy().tobytes()), "bf16"),
    ],
)
def test_embeddings_come_from_arrays_and_tensors_of_every_floating_dtype(given: Any, dtype: DType) -> None:
    tensor = embeds_of(given)
    assert tensor.dtype == dtype
    assert tensor.shape == (3, 2)
    kind = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}[tensor.dtype]
    assert torch.frombuffer(bytearray(tensor.data), dtype=kind).tolist() == ROWS.reshape(-1).tolist()


def test_embeddings_may_name_a_token_for_each_position() -> None:
    prompt, _, _ = convert({"prompt_embeds": ROWS, "prompt_token_ids": [7, 8, 9]})
    assert prompt.token_ids == pack_token_ids([7, 8, 9])
    assert prompt.length == 3
    assert convert({"prompt_embeds": ROWS})[0].length == 3


def test_information_is_of_scalars_lists_and_arrays() -> None:
    table = numpy.arange(4, dtype=numpy.int64).reshape(2, 2)
    given = {
        "count": numpy.int32(3),
        "share": 0.5,
        "name": "é",
        "yes": True,
        "none": [],
        "mixed": (1, 2.5, "x", False),
        "table": table,
        "raw": memoryview(b"abc"),
        "samples": array.array("f", [1.0]),
        "rows": torch.ones(1, 2, dtype=torch.bfloat16),
        "host": HostTensor(DType.U8, (1,), b"z"),
    }
    assert information_of(given) == {
        "count": 3,
        "share": 0.5,
        "name": "é",
        "yes": True,
        "none": [],
        "mixed": [1, 2.5, "x", False],
        "table": HostTensor(DType.I64, (2, 2), table.tobytes()),
        "raw": HostTensor(DType.U8, (3,), b"abc"),
        "samples": HostTensor(DType.F32, (1,), numpy.float32(1).tobytes()),
        "rows": HostTensor(DType.BF16, (1, 2), b"\x80\x3f" * 2),
        "host": HostTensor(DType.U8, (1,), b"z"),
    }


def test_tensors_of_information_follow_those_of_the_prompt() -> None:
    prompt, information, _ = convert({"prompt_embeds": ROWS, "additional_information": {"a": ROWS, "b": ROWS}})
    assert [ref.buffer for ref in (*prompt.tensor_refs(), *information.tensor_refs())] == [0, 1, 2]
