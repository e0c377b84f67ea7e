"""Adapters as users have them: a PEFT folder, or a safetensors file with the names of PEFT, diffusers or kohya."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
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
from sgld_lora_merge.adapter.weight_files import CONFIG, PICKLES, check_shard, pickle_advice, read_json, weight_files
from sgld_lora_merge.errors import LoraMergeError, RequestError, name_some, summarise
from sgld_lora_merge.wire.schema import DEFAULT_MODULE, Alpha

METADATA = "lora_adapter_metadata"  # diffusers puts PEFT's config there, as JSON
COMPONENT = f"{DEFAULT_MODULE}."  # diffusers' pipelines put the module's name in front
_PIPELINE_PART = re.compile(r"(transformer|unet|text_encoder|connectors)(_\d+)?")  # what pipelines put LoRA on


def load_pairs(path: Path, alpha: Alpha | None = None) -> tuple[Pair, ...]:
    """Return the pairs of an adapter, sorted by layer, each with its whole scale.

    Args:
        path: a folder that PEFT saved, in one file or in shards, or a safetensors file.
        alpha: of the layers for which the adapter itself says none; "rank" is each one's own rank.

    Raises:
        LoraMergeError: there is no such adapter, it is of a kind that is not merged, or something in it is wrong; the
            message says all that is.
    """
    files, index = weight_files(path)
    file = files[0] if len(files) == 1 else path
    named, own = _read(files, index)
    if path.is_file():
        configs = _configs_of(file)
    else:
        configs = {"": read_json((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))}
    front = COMPONENT if all(name.startswith(COMPONENT) for name, _ in named) else ""
    named = [(name.removeprefix(front), tensor) for name, tensor in named]
    own = {layer.removeprefix(front): scale for layer, scale in own.items()}
    pairing = pair_up(named, alpha=alpha, layer_scaling=own)
    if pairing.faults:
        raise RequestError(*(f"{file}: {fault}" for fault in pairing.faults))
    said = {layer_name(layer) for layer in own}
    said |= {layer_name(name.removesuffix(".alpha")) for name, _ in named if name.endswith(".alpha")}
    component_of = _components([f"{front}{pair.layer}" for pair in pairing.pairs], configs)
    scales = {
        component: _scales(configs[component], f"{path}, {component}" if component else str(path))
        for component in dict.fromkeys(component_of)
        if component is not None
    }
    unsaid = [each for each in zip(pairing.pairs, component_of, strict=True) if each[0].layer not in said]
    silent = [pair.layer for pair, component in unsaid if component is None]
    if silent and alpha is None:
        raise LoraMergeError(
            f"{file} says no alpha for {name_some(silent)}: say it with --alpha NUMBER, or with "
            "--alpha rank if scale 1.0 is meant, as by ComfyUI for a file that says none"
        )
    if scales and alpha is not None and not silent:
        alphas = ", ".join(f"{each.alpha:g}" for each in scales.values())
        raise LoraMergeError(f"{path} says its alpha itself, {alphas}: leave out --alpha")
    scale_of, faults = {}, []
    for pair, component in unsaid:
        if component is not None:
            # patterns are for a layer's name within its component
            layer = pair.layer if front else layer_name(pair.layer.removeprefix(f"{component}."))
            scale_of[pair.layer] = scales[component].of(layer, pair.rank)
            if (fault := scales[component].rank_fault(layer, pair.rank)) is not None:
                faults.append(f"{component}: {fault}" if component else fault)
    if faults:
        raise LoraMergeError(f"{path}: {summarise(faults)}")
    return tuple(replace(pair, scale=scale_of.get(pair.layer, pair.scale)) for pair in pairing.pairs)


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


def _read(files: Sequence[Path], index: Mapping[str, str]) -> tuple[list[tuple[str, torch.Tensor]], dict[str, float]]:
    """Return the named tensors of an adapter's files, and the whole scales of layers that their metadata has."""
    named: list[tuple[str, torch.Tensor]] = []
    scaling: dict[str, float] = {}
    for file in files:
        try:
            tensors, own = read_adapter(str(file))
        except RequestError as error:
            raise LoraMergeError(pickle_advice(file) if file.suffix in PICKLES else f"{file}: {error}") from error
        if index:
            check_shard(file, [name for name, _ in tensors], index)
        named += tensors
        scaling |= own
    return named, scaling


def _configs_of(file: Path) -> dict[str, dict[str, Any]]:
    """Return PEFT's configs in a file's metadata, where diffusers has put them, by component of the pipeline.

    A key has its component in front, as a layer's name has. The config of a file of one model has none: it is under "".
    """
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(METADATA)
    configs: dict[str, dict[str, Any]] = {}
    for key, value in ({} if text is None else read_json(text, f"{METADATA} of {file}")).items():
        component, _, field = key.rpartition(".")
        configs.setdefault(component, {})[field] = value
    return configs


def _components(layers: Sequence[str], configs: Collection[str]) -> list[str | None]:
    """Return for every layer the component whose config it has; None where the file has none for it.

    Where no layer has a component in front, all are the transformer's, as they are when diffusers reads the file.
    """
    split = [layer.partition(".")[0] for layer in layers]
    without = not any(first in configs or _PIPELINE_PART.fullmatch(first) for first in split)
    rest = "" if "" in configs else DEFAULT_MODULE if without and DEFAULT_MODULE in configs else None
    return [first if first in configs else rest for first in split]


def _scales(config: Mapping[str, Any], source: str) -> PeftScales:
    kind, initial = config.get("peft_type", "LORA"), config.get("init_lora_weights")
    if kind != "LORA":
        raise LoraMergeError(f"{source} is {kind}; only LoRA is merged")
    if faults := variant_faults(config):
        raise LoraMergeError(
            f"{source} is more than A and B, and only those are merged: {summarise(faults)}. Merge it in the trainer, "
            "and send full weights"
        )
    if not keeps_base(initial):
        raise LoraMergeError(
            f"{source} was initialised with {initial}, which changes the base weights too: save it as plain LoRA, with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if any(not isinstance(each, (int, float)) for each in (alpha, *patterns.values())):
        raise LoraMergeError(f"{source}: lora_alpha {alpha!r} and alpha_pattern {patterns!r} are not all numbers")
    rank, ranks = config.get("r"), config.get("rank_pattern") or {}
    if any(not isinstance(each, int) for each in (*ranks.values(), *(() if rank is None else (rank,)))):
        raise LoraMergeError(f"{source}: r {rank!r} and rank_pattern {ranks!r} are not all whole numbers")
    return PeftScales(float(alpha), patterns, bool(config.get("use_rslora")), rank, ranks)  # type: ignore[arg-type]  # a number
