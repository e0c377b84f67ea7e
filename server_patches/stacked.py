"""Layers of sglang's text encoders under their checkpoints' names, by the tables that it loads those with.

A row of a table is (the engine's name, the checkpoint's name, the section): ``(".qkv_proj", ".q_proj", "q")``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

CAUSAL_LM_PREFIX = "model."  # of transformers' models with a head; sglang's loaders drop it where there is no `model`
Stacked = Sequence[tuple[str, str, int | str]]


def stacked_projections(model: Any) -> Stacked:
    """Return the table of a model's configuration; empty where it has none."""
    config = getattr(model, "config", None)
    return getattr(getattr(config, "arch_config", config), "stacked_params_mapping", None) or ()


def unstacked(layer: str, table: Stacked, model: Any) -> Iterator[tuple[str, int | str | None]]:
    """Yield the engine's layers, and the section of each, that a layer of this name may be kept in."""
    if not table:
        return
    if not hasattr(model, "model"):
        layer = layer.removeprefix(CAUSAL_LM_PREFIX)
        yield layer, None
    for engine_name, checkpoint_name, section in table:
        old, new = (f".{name.strip('.')}." for name in (checkpoint_name, engine_name))
        if old in (dotted := f".{layer}."):
            yield dotted.replace(old, new).strip("."), section
