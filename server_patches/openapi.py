"""Describe the plugin's routes in the engine's OpenAPI schema; they parse their bodies themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return an operation whose body is this model in JSON."""
    return {"requestBody": {"content": {"application/json": {"schema": _inlined_schema(model)}}}}


def file_body(query: type[BaseModel]) -> dict[str, Any]:
    """Return an operation whose query is this model and whose body is a file."""
    schema = _inlined_schema(query)
    required = schema.get("required", ())
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in schema["properties"].items()
        ],
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
    }


def described(original: Callable[[], dict[str, Any]], router: APIRouter, path: str) -> dict[str, Any]:
    """Return the app's schema, in which one path is described by the plugin's router and not by sglang's."""
    schema = original()
    own = get_openapi(title="", version="", routes=router.routes)
    schema["paths"][path] = own["paths"][path]
    return schema


def _inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the model's schema with each reference replaced by its definition."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(definitions[part["$ref"].rpartition("/")[2]])
        return {name: resolved(each) for name, each in part.items()}

    inlined: dict[str, Any] = resolved(schema)
    return inlined
