"""What the engine's OpenAPI schema says of our routes, which read their bodies themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """An operation whose body is this model in JSON."""
    return {"requestBody": {"content": {"application/json": {"schema": _whole(model)}}}}


def file_body(query: type[BaseModel]) -> dict[str, Any]:
    """An operation whose query is this model and whose body is a file."""
    schema = _whole(query)
    required = schema.get("required", ())
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in schema["properties"].items()
        ],
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
    }


def described(original: Callable[[], dict[str, Any]], router: APIRouter, path: str) -> dict[str, Any]:
    """The app's schema; what it says of a path is what our router does there, and not what sglang's would."""
    schema = original()
    own = get_openapi(title="", version="", routes=router.routes)
    schema["paths"][path] = own["paths"][path]
    return schema


def _whole(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema with what it refers to in place: a document has its definitions elsewhere."""
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

    whole: dict[str, Any] = resolved(schema)
    return whole
