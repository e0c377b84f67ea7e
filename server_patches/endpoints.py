"""Ask an app's own routes which endpoint answers a request, in every layout that FastAPI gives them.

FastAPI below 0.137 copies each route of an included router into the app. Later versions keep one entry for the whole
router; that entry has no endpoint of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import Match

from sgld_lora_merge.errors import LoraMergeError

Endpoint = Callable[..., Any]
TESTED_FASTAPI = "0.165.0"  # by all tests; which older ones were tried: docs/security-testing.md


def include_first(app: FastAPI, router: APIRouter) -> None:
    """Include a router whose routes are tried before all others, and ask the app whether they answer.

    Raises:
        LoraMergeError: another endpoint answers one of them.
    """
    entries = app.router.routes
    before = len(entries)
    app.include_router(router)
    entries[:] = entries[before:] + entries[:before]
    for route in each_route(router.routes):
        for method in route.methods:
            found = matched_endpoint(app.router.routes, request_for(method, route.path))
            if found != route.endpoint:
                raise LoraMergeError(
                    f"{method} {route.path} is answered by {name_of(found)} and not by the plugin, with fastapi "
                    f"{version('fastapi')} and starlette {version('starlette')}: install fastapi {TESTED_FASTAPI}, "
                    "with which the plugin is tested, and the starlette that it asks for"
                )


def each_route(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield the routes in the order in which they are tried; an included router is replaced by its routes."""
    for route in routes:
        contexts = getattr(route, "effective_route_contexts", None)
        if contexts is None:
            yield route
        else:
            yield from contexts()


def every_route(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield the routes as `each_route` does, and those of mounted apps behind them."""
    for route in each_route(routes):
        yield route
        yield from every_route(_mounted(route))


def matched_endpoint(routes: Iterable[Any], scope: Mapping[str, Any]) -> Endpoint | None:
    """Return the endpoint that these routes choose for a request; None where no route has its path.

    A route that has the path but not the method counts if there is no other one: it answers 405.

    Args:
        scope: of the request, as ASGI has it; it is not changed.
    """
    other_method = None
    for route in each_route(routes):
        match, child = route.matches(dict(scope))
        if match is Match.NONE:
            continue
        nested = _mounted(route)
        endpoint: Endpoint | None = child.get("endpoint")
        if nested:
            endpoint = matched_endpoint(nested, {**scope, **child})
        if match is Match.FULL:
            return endpoint
        other_method = other_method or endpoint
    return other_method


def name_of(endpoint: Endpoint | None) -> str:
    """Return module and name of an endpoint, for a message."""
    if endpoint is None:
        return "nothing"
    return f"{getattr(endpoint, '__module__', '?')}.{getattr(endpoint, '__name__', type(endpoint).__name__)}"


def request_for(method: str, path: str) -> dict[str, Any]:
    """Return the scope of a request that asks for nothing but a route."""
    return {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "headers": []}


def _mounted(route: Any) -> list[Any]:
    """Return the routes of an app that is mounted here."""
    return list(getattr(_effective(route), "routes", None) or ())


def _effective(route: Any) -> Any:
    return getattr(route, "starlette_route", None) or route
