"""The routes with which vLLM's operators load and unload LoRA adapters. They need the operator's key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from msgspec import Struct
from starlette.responses import PlainTextResponse, Response

from omni_actors.errors import InvalidRequest
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.json_body import JsonBody
from omni_actors.http_server.state import State
from omni_actors.protocol.adapters import AdapterName, Folder

router = APIRouter()

UNKNOWN = "adapter"  # the field that the pipeline names if it has no such adapter
FIELDS = {"name": "lora_name", "folder": "lora_path"}  # of vLLM, by ours


class LoadLoraAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """A folder on the hosts of the replicas, and the name that requests give as their model."""

    lora_name: AdapterName
    lora_path: Folder
    load_inplace: bool = False


class UnloadLoraAdapter(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of an adapter that was loaded."""

    lora_name: AdapterName


LOAD = JsonBody(LoadLoraAdapter)
UNLOAD = JsonBody(UnloadLoraAdapter)


@router.post("/v1/load_lora_adapter", response_class=Response, openapi_extra=LOAD.openapi())
async def load(body: Annotated[LoadLoraAdapter, Depends(LOAD)], state: State) -> Response:
    """Load an adapter in all replicas; the answer comes when they have it."""
    _check_offered(state)
    if body.load_inplace:
        raise bad_field("load_inplace", "load_inplace is not supported: unload the adapter first.", "unsupported_value")
    if not body.lora_path:
        raise bad_field("lora_path", "lora_path is empty.")
    try:
        await state.client.load_adapter(body.lora_name, body.lora_path)
    except InvalidRequest as error:
        raise HttpError.of(error, FIELDS) from error
    state.changed()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, openapi_extra=UNLOAD.openapi())
async def unload(body: Annotated[UnloadLoraAdapter, Depends(UNLOAD)], state: State) -> Response:
    """Refuse an adapter to further requests; those that run with it go on."""
    _check_offered(state)
    try:
        await state.client.unload_adapter(body.lora_name)
    except InvalidRequest as error:
        if error.field == UNKNOWN:
            raise HttpError(404, str(error), param="lora_name", code="not_found") from error
        raise HttpError.of(error, FIELDS) from error
    state.changed()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_offered(state: State) -> None:
    """Refuse operators as long as they have no key: that of all clients must not do."""
    if state.settings.operator_key is None:
        message = "Operators have no key here: set OMNI_ACTORS_OPERATOR_KEY for the server, or use omni-actors ctl."
        raise HttpError(404, message, code="not_found")
