"""Which arithmetic a merge uses, and the scale of a pair."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from enum import StrEnum

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.settings import PRECISION_VARIABLE, settings_from
from sgld_lora_merge.wire.schema import Alpha

_FLOAT32_MAX = 3.4028234663852886e38


class Precision(StrEnum):
    """How ``W' = W0 + scale * B @ A`` is rounded.

    FP32: at least in float32, rounded once into the weight's dtype.
    FP16: every step in the weight's own dtype (bfloat16 included; the name is historical), bit for bit what a trainer's
    eager ``W0 + ((B @ A) * scale).to(W0.dtype)`` gives.
    """

    FP32 = "fp32"
    FP16 = "fp16"


def precision_from_environment(environ: Mapping[str, str] = os.environ) -> Precision:
    """Read ``SGLANG_DIFFUSION_LORA_MERGE_FP32``: "1", empty or unset is FP32, "0" is FP16.

    Raises:
        LoraMergeError: any other value; the message names the variable and the value.
    """
    return Precision(settings_from({PRECISION_VARIABLE: environ.get(PRECISION_VARIABLE, "")}).precision)


def scale_of(alpha: Alpha | None, rank: int) -> float:
    """Return ``alpha / rank`` in float64 (LoRA, Hu et al. 2021, section 4.1); "rank" and None mean alpha = rank: 1.0.

    The value is applied as a float32.

    Raises:
        RequestError: the scale is not finite as a float32.
    """
    if alpha is None or isinstance(alpha, str):
        return 1.0
    return checked_scale(alpha / rank, f"lora_alpha {alpha} over rank {rank}")


def checked_scale(scale: float, origin: str) -> float:
    """Return ``scale`` itself where float32 can hold it; ``origin`` names it in the error.

    Raises:
        RequestError: NaN, infinite, or beyond float32.
    """
    if not math.isfinite(scale) or abs(scale) > _FLOAT32_MAX:
        raise RequestError(f"{origin} gives the scale {scale}, which is not a finite float32")
    return scale
