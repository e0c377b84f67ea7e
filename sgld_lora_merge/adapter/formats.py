"""Adapters as users have them: a PEFT folder, or a safetensors file with the names of PEFT, diffusers or kohya."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sgld_lora_merge.adapter.file import read_adapter
from sgld_lora_merge.adapter.names import layer_name
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.peft_config import PeftScales, keeps_base, variant_faults
from sgld_lora_merge.errors import LoraMergeError, RequestError, name_some, summarise

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
METADATA = "lora_adapter_metadata"  # diffusers puts PEFT's config there, as JSON
COMPONENT = "transformer."  # diffusers' pipelines put the module's name in front


def load_pairs(path: Path, alpha: float | None = None) -> tuple[Pair, ...]:
    """Return the pairs of an adapter, sorted by layer, each with its whole scale.

    Args:
        path: a folder that PEFT saved, or a safetensors file.
        alpha: of the layers for which the adapter itself says none.

    Raises:
        LoraMergeError: there is no such adapter, it is of a kind that is not merged, or something in it is wrong; the
            message says all that is.
    """
    file, config = _find(path)
    try:
        named, own = read_adapter(str(file))
    except RequestError as error:
        raise LoraMergeError(f"{file}: {error}") from error
    if config is None:
        config = _config_of(file)
    if all(name.startswith(COMPONENT) for name, _ in named):
        named = [(name.removeprefix(COMPONENT), tensor) for name, tensor in named]
        own = {layer.removeprefix(COMPONENT): scale for layer, scale in own.items()}
    if config is not None and alpha is not None:
        raise LoraMergeError(f"{path} says its alpha itself, {config.get('lora_alpha')}: leave out --alpha")
    pairing = pair_up(named, alpha=alpha, layer_scaling=own)
    if pairing.faults:
        raise RequestError(*(f"{file}: {fault}" for fault in pairing.faults))
    said = {layer_name(layer) for layer in own}
    said |= {layer_name(name.removesuffix(".alpha")) for name, _ in named if name.endswith(".alpha")}
    silent = [pair.layer for pair in pairing.pairs if pair.layer not in said]
    if config is None and alpha is None and silent:
        raise LoraMergeError(f"{file} says no alpha for {name_some(silent)}: say it with --alpha")
    if config is None:
        return tuple(pairing.pairs)
    scales = _scales(config, path)
    by_config = [pair for pair in pairing.pairs if pair.layer not in said]
    if faults := [fault for pair in by_config if (fault := scales.rank_fault(pair.layer, pair.rank)) is not None]:
        raise LoraMergeError(f"{path}: {summarise(faults)}")
    return tuple(
        pair if pair.layer in said else replace(pair, scale=scales.of(pair.layer, pair.rank)) for pair in pairing.pairs
    )


def named_tensors(pairs: Sequence[Pair]) -> list[tuple[str, torch.Tensor]]:
    """Return the pairs under the names of the wire, those of convolutions with their kernels."""
    named = []
    for pair in pairs:
        a = pair.a.view(pair.rank, -1, *pair.kernel)
        named += [
            (f"{pair.layer}.lora_A", a),
            (f"{pair.layer}.lora_B", pair.b.view(*pair.b.shape, *[1] * (a.dim() - 2))),
        ]
    return [(name, tensor.contiguous()) for name, tensor in named]


def _find(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the file with the tensors, and PEFT's config beside it."""
    if path.is_file():
        return path, None
    if not path.exists():
        raise LoraMergeError(f"{path} does not exist")
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise LoraMergeError(f"{path} has no {name}: save the adapter with PEFT's save_pretrained, or name a file")
    return path / WEIGHTS, _read_json((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))


def _config_of(file: Path) -> dict[str, Any] | None:
    """Return PEFT's config in a file's metadata, where diffusers has put it; its keys may have the module in front."""
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(METADATA)
    if text is None:
        return None
    return {key.removeprefix(COMPONENT): value for key, value in _read_json(text, f"{METADATA} of {file}").items()}


def _read_json(text: str, source: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise LoraMergeError(f"{source} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoraMergeError(f"{source} is not a JSON object")
    return content


def _scales(config: Mapping[str, Any], path: Path) -> PeftScales:
    kind, initial = config.get("peft_type", "LORA"), config.get("init_lora_weights")
    if kind != "LORA":
        raise LoraMergeError(f"{path} is {kind}; only LoRA is merged")
    if faults := variant_faults(config):
        raise LoraMergeError(
            f"{path} is more than A and B, and only those are merged: {summarise(faults)}. Merge it in the trainer, "
            "and send full weights"
        )
    if not keeps_base(initial):
        raise LoraMergeError(
            f"{path} was initialised with {initial}, which changes the base weights too: save it as plain LoRA, with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if any(not isinstance(each, (int, float)) for each in (alpha, *patterns.values())):
        raise LoraMergeError(f"{path}: lora_alpha {alpha!r} and alpha_pattern {patterns!r} are not all numbers")
    rank, ranks = config.get("r"), config.get("rank_pattern") or {}
    if any(not isinstance(each, int) for each in (*ranks.values(), *(() if rank is None else (rank,)))):
        raise LoraMergeError(f"{path}: r {rank!r} and rank_pattern {ranks!r} are not all whole numbers")
    return PeftScales(float(alpha), patterns, bool(config.get("use_rslora")), rank, ranks)  # type: ignore[arg-type]  # a number
