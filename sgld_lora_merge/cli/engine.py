"""One running engine, as the commands see it."""

from __future__ import annotations

import httpx

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.trainer.answers import ShownStatus
from sgld_lora_merge.trainer.transport import (
    STATUS_ROUTE,
    Answer,
    HttpTransport,
    SyncError,
    UploadTransport,
    accepted,
)


def connect(url: str, *, upload: bool = False) -> HttpTransport:
    """The engine at a URL, ``http://`` in front or not; updates go as JSON, or as an uploaded file.

    Raises:
        LoraMergeError: it is no URL.
    """
    try:
        return (UploadTransport if upload else HttpTransport)(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise LoraMergeError(f"{url!r} is no URL: {error}") from error


def status(engine: HttpTransport) -> Answer:
    """What is live.

    Raises:
        LoraMergeError: there is no engine, one without the plugin, or one whose status lacks what is shown of it.
    """
    try:
        return accepted(f"{engine.url} answered", engine.ask(STATUS_ROUTE), ShownStatus)
    except SyncError as error:
        if error.answered == 404:
            raise LoraMergeError(
                f"{engine.url} is an engine without sgld-lora-merge: run doctor where it runs"
            ) from error
        raise
