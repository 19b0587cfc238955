"""Which routes there are: found before a body is read, so that a wrong path is said to be one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from omni_actors.http_server.errors import HttpError, bad_field

PREFIX = "/v1"


def check_route(routes: Sequence[BaseRoute], scope: Scope) -> None:
    """Raise `HttpError` 404 for a path that no route has, 405 for one whose routes have other methods.

    And 400 for a parameter of the query that the route does not have, except where probes and browsers add their own.
    """
    path: str = scope["path"]
    if path == "/" or not path.endswith("/"):
        same = [path]
    else:
        same = [path, path.rstrip("/")]  # the router redirects to the latter
    methods: set[str] = set()
    for candidate in same:
        for route in routes:
            match, _ = route.matches({**scope, "path": candidate})
            if match is Match.FULL:
                if isinstance(route, APIRoute) and path.startswith(f"{PREFIX}/"):
                    _check_query(route, scope)
                return
            if match is Match.PARTIAL and isinstance(route, Route):
                methods |= route.methods or set()
    if not methods:
        raise no_route(routes, path)
    allowed = ", ".join(sorted(methods - {"HEAD"}))
    error = HttpError(405, f"{path[:200]} takes {allowed}, not {scope['method'][:20]}.", code="http_405")
    error.headers["allow"] = allowed
    raise error


def _check_query(route: APIRoute, scope: Scope) -> None:
    known = [field.alias for field in route.dependant.query_params]
    for name in QueryParams(scope["query_string"]):
        if name not in known:
            what = f"it has {', '.join(known)}" if known else "it has none"
            raise bad_field(
                name[:100],
                f"{name[:100]}: {route.path} has no such parameter of the query; {what}.",
                "unknown_parameter",
            )


def no_route(routes: Sequence[BaseRoute], path: str) -> HttpError:
    """The error for a path that no route has, with the nearest one and the others."""
    there = {route.path: route.methods or set() for route in routes if isinstance(route, Route)}
    listed = [known for known in there if known.startswith(f"{PREFIX}/") or known == "/health"]
    wanted = f"{PREFIX}{path}" if not path.startswith(PREFIX) else path
    nearest = difflib.get_close_matches(wanted[:200], listed, n=1, cutoff=0.7)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return HttpError(
        404, f"There is nothing at {path[:200]!r}.{hint} The routes are {', '.join(sorted(listed))}.", code="not_found"
    )
