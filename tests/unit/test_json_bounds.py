"""JSON bodies are counted before they are decoded: what would take long is refused, what is inside strings is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.http_server.bodies import (
    MAX_CONTAINERS,
    MAX_QUOTES,
    MAX_TEXT_BYTES,
    MAX_TOKEN_VALUES,
    MAX_VALUES,
    SHORT,
    check_bounds,
)
from omni_actors.http_server.errors import HttpError

MIB = 1 << 20
PADDING = b" " * SHORT  # so that a body is long enough to be looked at


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"{" + b",".join(b'"k%d":1' % n for n in range(MAX_VALUES + 2)) + b"}", "members"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "members"),
        (b'["a"' + b',"a"' * (MAX_VALUES + 1) + b"]", "members"),
        (b"[" * SHORT + b"[", "lists and objects"),
        (b'{"a":' * MAX_CONTAINERS + b"{", "lists and objects"),
        (b'"' + b'\\"' * MAX_QUOTES + b'"', "quotation marks"),
        (b'"":' * (MAX_QUOTES // 2), "quotation marks"),
        (b'{"a":"' + b"x" * MAX_TEXT_BYTES + b'"}', "without its media"),
        (b'{"' + b"x" * MAX_TEXT_BYTES + b'":1}', "without its media"),
        (b'{"a":' + b"1" * MAX_TEXT_BYTES + b"}", "without its media"),
        (b"{" + b" " * MAX_TEXT_BYTES + b"}", "without its media"),
        (b'{"a":"' + b"x" * MAX_TEXT_BYTES, "without its media"),
        (b'{"a":["data","' + b"x" * MAX_TEXT_BYTES + b'"]}', "without its media"),
        (b'{"a":"\\",\\"data\\":","b":"' + b"x" * MAX_TEXT_BYTES + b'"}', "without its media"),
    ],
    ids=lambda given: given if isinstance(given, str) else repr(given[:12]),
)
def test_what_would_take_long_to_decode_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(HttpError, match=what) as caught:
        check_bounds(body, MAX_VALUES)
    assert caught.value.status == 413
    assert caught.value.code == "body_too_large"


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_audio":{"data":"' + b"x" * 20 * MIB + b'"},"image_url":{"url" : "' + b"x" * 20 * MIB + b'"}}',
        b'{"file":{"file_data":"' + b"x" * 20 * MIB + b'"}}',
        b'{"text":"' + b"a, b, [c] {d}: " * 200_000 + b'"}',
        b'{"text":"' + b'\\"k\\": 1, ' * 200_000 + b'"}',
        b'{"text":"' + b"\\\\" * MIB + b'"}',
        b"[" + b"1," * (MAX_VALUES - 1) + b"1]",
        b"",
        b'"' + PADDING,
    ],
    ids=lambda given: repr(given[:20]),
)
def test_media_and_long_texts_pass(body: bytes) -> None:
    check_bounds(body, MAX_VALUES)


def test_a_list_of_a_million_token_ids_fits_where_it_may_be_sent() -> None:
    body = b'{"prompt":[' + b"151643," * 999_999 + b"1]}"
    check_bounds(body, MAX_TOKEN_VALUES)
    with pytest.raises(HttpError):
        check_bounds(body, MAX_VALUES)


VALUES = st.recursive(
    st.none() | st.integers() | st.text('",:[]{}\\ax'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('",:[]{}\\ax'), inner, max_size=4),
    max_leaves=20,
)


def commas(value: Any) -> int:
    """Members and items of all objects and lists, after the first one of each."""
    items = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(items) - 1) + sum(map(commas, items)) if isinstance(items, list) else 0


@given(VALUES)
def test_only_what_is_outside_of_strings_counts(value: Any) -> None:
    body = PADDING + json.dumps(value).encode()
    check_bounds(body, commas(value))
    if commas(value):
        with pytest.raises(HttpError, match="members"):
            check_bounds(body, commas(value) - 1)
