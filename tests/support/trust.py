"""One TLS context for all clients of the tests' process that trust the usual certificates.

httpx and the openai package read more than a hundred of them for each client, also for one that speaks plain HTTP. That
takes 30 ms of a processor, and the tests make thousands of clients.
"""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import certifi

USUAL = {certifi.where(), os.environ.get("SSL_CERT_FILE")}
make = ssl.create_default_context


@functools.cache
def usual(cafile: str) -> ssl.SSLContext:
    return make(cafile=cafile)


def context(*args: Any, **options: Any) -> ssl.SSLContext:
    """The shared context if the usual certificates are all that is asked for."""
    if not args and options.keys() == {"cafile"} and options["cafile"] in USUAL:
        return usual(options["cafile"])
    return make(*args, **options)


def share() -> None:
    """Replace `ssl.create_default_context` in this process."""
    ssl.create_default_context = context
