"""The table of routes."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from omni_actors.http_server.app import ENDPOINTS, Endpoint


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.body is not None], ids=lambda one: one.path)
def test_a_body_is_decoded_into_what_its_handler_takes(endpoint: Endpoint) -> None:
    taken = list(get_type_hints(endpoint.handler).values())[2]
    (kind,) = get_args(taken) or (taken,)  # that of a Form[...]
    assert issubclass(endpoint.body.kind, kind)
