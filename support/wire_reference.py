"""The tables of docs/wire.md, made from the OpenAPI schema of the routes and from the models of the contract.

    python -m support.wire_reference --write      # in the environment of an engine

In the page a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is around it is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from sgld_lora_merge.wire import schema

PAGE = Path(__file__).parents[1] / "docs" / "wire.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Schema = dict[str, Any]


def routes() -> str:
    """Return a table of every route of the plugin, from its OpenAPI schema."""
    from server_patches.coordinator import Coordinator
    from server_patches.replicas import Replicas
    from server_patches.routes import MergeRoutes

    async def nobody(*_: Any) -> Any:
        raise NotImplementedError

    app = FastAPI()
    app.include_router(MergeRoutes(Coordinator(Replicas(nobody, 1), staging_timeout_s=1.0)).router())
    rows = [
        f"| `{method.upper()} {path}` | {_cell(operation['description'])} |"
        for path, operations in app.openapi()["paths"].items()
        for method, operation in operations.items()
    ]
    return "\n".join(("| route | what it does |", "|---|---|", *rows))


def fields(model: type[BaseModel]) -> str:
    """Return a table with one row for each field of a request or an answer."""
    made = model.model_json_schema()
    required = made.get("required", [])
    rows = [
        f"| `{name}` | {_cell(_type(field))} | {'required' if name in required else _default(field)} | "
        f"{_cell(field.get('description', ''))} |"
        for name, field in made.get("properties", {}).items()
    ]
    return "\n".join(("| field | type | default | meaning |", "|---|---|---|---|", *rows))


def page(text: str) -> str:
    """Return the page with its tables made anew.

    Raises:
        AttributeError: a table is named after no model of the contract.
    """

    def table(found: re.Match[str]) -> str:
        made = routes() if found[2] == "routes" else fields(getattr(schema, found[2]))
        return f"{found[1]}{made}\n{found[3]}"

    return _TABLE.sub(table, text)


def _type(schema: Schema) -> str:
    """Return a JSON type in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if schema["type"] == "object":
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema["type"])


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    warnings.simplefilter("ignore")  # of sglang's imports
    made = page(PAGE.read_text())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
    sys.stdout.write(made)


if __name__ == "__main__":
    main()
