"""Compile the merge kernel while the server starts, so that the first update does not wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.fingerprint import fingerprint_of
from sgld_lora_merge.merge.kernels import compile_ahead

logger = logging.getLogger(__name__)

RANKS = (16, 32, 64, 128)  # what adapters have; another rank up to 256 is padded to one of these, or to 256
PAIR_DTYPES = (torch.bfloat16, torch.float32)


def compile_in_background(device: torch.device, precision: Precision, weights: Collection[torch.dtype]) -> None:
    """Start compiling for weights of these dtypes, on a GPU; an update that comes before compiles what it needs."""
    if device.type == "cuda" and weights:
        name = "sgld-lora-merge-compile"
        threading.Thread(target=_compile, args=(device, precision, weights), name=name, daemon=True).start()


def _compile(device: torch.device, precision: Precision, weights: Collection[torch.dtype]) -> None:
    started = time.monotonic()
    try:
        torch.cuda.set_device(device)
        for weight in weights:
            for pair in PAIR_DTYPES:
                for rank in RANKS:
                    compile_ahead(device, precision, weight, pair, rank)
        fingerprint_of(torch.zeros(1, device=device))  # last: every update merges, not every one is fingerprinted
    except Exception as error:  # the first update compiles what it needs, and reports an error that stays
        logger.warning("the merge kernel was not compiled ahead: %s", error)
    else:
        logger.info("the merge kernel is compiled: %.1f s in the background", time.monotonic() - started)
