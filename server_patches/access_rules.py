"""Which requests may reach a weight endpoint: its token, origin, content type and size, as pure functions.

The engine's own CORS policy is ``*``, so a web page could otherwise post a pickle from a browser beside the engine. A
page can also make its own name stand for the engine's address, so that the same name is not the same origin.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi.routing import APIRouter

from server_patches.compat import SUPPORTED
from server_patches.endpoints import Endpoint, matched_endpoint, name_of, request_for
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import API_KEY_VARIABLE, MAX_BODY_VARIABLE, Settings

SHOWN_CHARACTERS = 80  # of a header's value in a message
# sglang's routes that change or reveal weights. The start fails if one is missing or would not be guarded, because a
# version with other names may have weight endpoints that `is_guarded` does not know.
WEIGHT_ROUTES = (
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_tensor_checker",
    "/get_weights_checksum",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/v1/set_lora",
    "/v1/merge_lora_weights",
    "/v1/unmerge_lora_weights",
    "/v1/list_loras",
)
OWN_PACKAGE = "server_patches."
_WEIGHTS_PACKAGE = "sglang.multimodal_gen.runtime.entrypoints.post_training."
_GENERATION = _WEIGHTS_PACKAGE + "rollout_api.rollout_generate"


@dataclass(frozen=True)
class Limits:
    """The limits that the environment sets.

    Attributes:
        api_key: bearer token that guarded routes need; None needs none.
        max_body_bytes: of one request.
    """

    api_key: str | None = None
    max_body_bytes: int = Settings.max_body_bytes  # CPU tensors may travel inline; handles take kilobytes


def limits_from(settings: Settings) -> Limits:
    """Return the limits that the settings set."""
    return Limits(settings.api_key, settings.max_body_bytes)


def is_guarded(endpoint: Endpoint | None) -> bool:
    """Return whether an endpoint changes or reveals weights.

    Guarded are: all endpoints of the plugin except ``/model_info``; all of sglang's post-training package except
    generation; and every other endpoint with "weights" or "lora" in its name. An endpoint that a later sglang adds
    there is guarded too.
    """
    module, name = getattr(endpoint, "__module__", None) or "", getattr(endpoint, "__name__", "")
    if module.startswith(OWN_PACKAGE):
        return name != "model_info"
    if module.startswith(_WEIGHTS_PACKAGE):
        return f"{module}.{name}" != _GENERATION
    return "lora" in name.lower() or "weights" in name.lower()


def check_weight_routes(router: APIRouter) -> None:
    """Check that sglang's weight routes are there and that their endpoints are guarded.

    Raises:
        LoraMergeError: one is not.
    """
    for path in WEIGHT_ROUTES:
        found = matched_endpoint(router.routes, request_for("POST", path))
        if not is_guarded(found):
            raise LoraMergeError(
                f"sglang {version('sglang')} answers {path} by {name_of(found)}, which is no weight route that the "
                f"plugin knows: install sglang {' or '.join(SUPPORTED)}, or exclude the plugin sgld_lora_merge with "
                "SGLANG_PLUGINS"
            )


def reads_files(endpoint: Endpoint) -> bool:
    """Return whether an endpoint reads a file from the body and not JSON."""
    return endpoint.__module__.startswith(OWN_PACKAGE) and getattr(endpoint, "__name__", "") == "upload"


def has_control_characters(scope: Mapping[str, Any]) -> bool:
    """Return whether a path has a control character, as it was sent or after decoding.

    The router's patterns end in ``$``, which also matches in front of a final newline.
    """
    decoded = any(character < " " or "\x7f" <= character <= "\x9f" for character in scope["path"])
    return decoded or any(byte < 0x20 or byte == 0x7F for byte in scope.get("raw_path") or b"")


def refusal(
    method: str, headers: Mapping[str, str], limits: Limits, *, json_only: bool = True
) -> tuple[int, str] | None:
    """Return status and message for a request that must not reach a guarded route; None for one that may.

    Args:
        headers: with lower-case names.
        json_only: the route reads JSON; a browser sends other types across origins without asking.
    """
    if limits.api_key is not None:
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {limits.api_key}".encode()):
            return 401, f"{API_KEY_VARIABLE} is set: send Authorization: Bearer <its value>"
    origin, host = headers.get("origin"), headers.get("host", "")
    own = (f"http://{host}", f"https://{host}") if limits.api_key is not None or _is_address(host) else ()
    if origin is not None and origin not in own:
        return 403, f"the origin {shortened(origin)} is foreign to this engine; weight routes are not for web pages"
    if method != "POST":
        return None
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if json_only and (body or content_type) and content_type != "application/json":
        return 415, f"content type {shortened(content_type) or 'none'!r}: this route reads application/json"
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        return 415, f"content encoding {shortened(encoding)!r}: compressed bodies are not read; send the body as it is"
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        return 413, too_large(int(length), limits)
    return None


def _is_address(host: str) -> bool:
    """Return whether a Host header is an IP address or localhost, with or without a port."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def too_large(size: int, limits: Limits) -> str:
    return (
        f"the body has {size} bytes or more, the limit is {limits.max_body_bytes} ({MAX_BODY_VARIABLE}); "
        "send handles or smaller buckets"
    )


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
