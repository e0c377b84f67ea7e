"""Read a PEFT model: the pairs of one adapter, their scales and the weights under them, or all its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from sgld_lora_merge.adapter.peft_config import keeps_base, variant_faults
from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.merge.targets import CONVOLUTIONS
from sgld_lora_merge.trainer.account import NamedModules, Survey, several_active, survey, unsent_faults
from sgld_lora_merge.trainer.base import BaseWeights, read_base
from sgld_lora_merge.trainer.expected import merged_weight
from sgld_lora_merge.trainer.names import (
    BASE_LAYER,
    LayerPair,
    PeftLoRAKeyMapper,
    collect_lora_layer_groups,
    is_adapter_key,
    unwrapped,
)

_BASE_WEIGHT = f".{BASE_LAYER}.weight"
# fields of a config whose tensors, layers or own sentence say what they are
_NAMED_ELSEWHERE = {"bias", "lora_bias", "modules_to_save", "trainable_token_indices", "use_dora"}


@dataclass(frozen=True, eq=False)
class TrainedAdapter:
    """One module's adapter; tensors may be shards.

    Attributes:
        pairs: by layer prefix, sorted.
        scales: the whole scale of each layer that PEFT knows one for.
        base: the weight that each layer's pair is added to.
        trained_on: all base weights of the module, of layers without a pair too.
        moved_by: PEFT's init that changed those weights; None where they are the checkpoint's.
    """

    pairs: Mapping[str, LayerPair]
    scales: Mapping[str, float]
    base: Mapping[str, torch.Tensor]
    trained_on: BaseWeights
    moved_by: str | None = None

    @cached_property
    def layers(self) -> Mapping[str, TrainedLayer]:
        """What travels of each layer: A and B."""
        return {layer: TrainedLayer({"lora_A": pair.a, "lora_B": pair.b}, True) for layer, pair in self.pairs.items()}


def read_adapter(
    model: nn.Module,
    mapper: PeftLoRAKeyMapper,
    values: Mapping[str, torch.Tensor] | None = None,
    allow_unsynced: Sequence[str] = ("*",),
    surveyed: Survey | None = None,
) -> TrainedAdapter:
    """Read the adapter out of a model. Scales are those that PEFT computes with, patterns and rsLoRA included.

    Args:
        values: in the place of those of the model, under the keys of its state dict: of every tensor of the adapter.
        allow_unsynced: patterns of parameters that may be trained, or differ from the engine's, although pairs do not
            carry them; all of them where they are sent besides.
        surveyed: the model's modules; None for a look at them.

    Raises:
        RequestError: there is nothing to send, keys have no place, or something is trained that a pair cannot carry.
    """
    surveyed = surveyed or survey(model)
    faults = _faults_of(surveyed.of_peft, mapper.adapter)
    state = model.state_dict()
    if values is not None:
        state = state | replacements(state, values, [key for key in state if mapper.is_lora_key(key)])
    pairs: Mapping[str, LayerPair] = {}
    try:
        pairs, unmapped = collect_lora_layer_groups(state, mapper)
        if unmapped:
            faults.append(f"{len(unmapped)} keys of adapter {mapper.adapter!r} have no place: {name_some(unmapped)}")
    except RequestError as error:
        faults.extend(error.faults)
    if not pairs and not faults:
        raise RequestError(
            f"the model has no lora_A and lora_B of adapter {mapper.adapter!r}: nothing to send. Its keys are like "
            f"{name_some(list(state)[:3])}"
        )
    if faults := [*faults, *unsent_faults(surveyed, mapper, allow_unsynced)]:
        raise RequestError(*faults)
    scales = {
        unwrapped(name): float(scaling[mapper.adapter])
        for name, module in surveyed.of_peft
        if isinstance(scaling := vars(module).get("scaling"), dict) and mapper.adapter in scaling
    }
    bare = {unwrapped(key): tensor for key, tensor in state.items() if key.endswith(".weight")}
    base = {key.removesuffix(_BASE_WEIGHT): tensor for key, tensor in bare.items() if key.endswith(_BASE_WEIGHT)}
    moved_by = _init_that_moved_the_base(surveyed.of_peft, mapper.adapter)
    return TrainedAdapter(pairs, scales, base, read_base(surveyed, bare, allow_unsynced), moved_by)


def replacements(
    state: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], needed: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return values under the keys of a state dict; wrappers in the names of either make no difference.

    Args:
        needed: keys that must all have a value, or old and new values would be mixed.

    Raises:
        RequestError: a value is missing, is of no such key, or has another shape.
    """
    by_name = {unwrapped(key): key for key in state}
    given = {unwrapped(key): value for key, value in values.items()}
    faults = [f"{by_name[name]!r} has no value" for name in map(unwrapped, needed) if name not in given]
    for name, value in given.items():
        if name not in by_name:
            faults.append(f"there is a value of {name!r}, which the model does not have")
        elif value.shape != (shape := state[by_name[name]].shape):
            faults.append(f"the value of {name!r} has shape {tuple(value.shape)}, the model's has {tuple(shape)}")
    if faults:
        raise RequestError(*faults)
    return {by_name[name]: value for name, value in given.items()}


def scales_of_their_own(adapter: TrainedAdapter, alpha: float | None, rank: int | None) -> dict[str, float]:
    """Return the scales that alpha / rank of the request does not say, by layer prefix."""
    said = None if alpha is None or rank is None else alpha / rank
    return {
        layer: scale
        for layer, scale in adapter.scales.items()
        if layer in adapter.pairs and (scale != said or adapter.pairs[layer].a.shape[0] != rank)
    }


@dataclass(frozen=True, eq=False)
class TrainedLayer:
    """What travels of one layer, and the pair that is merged into its weight before.

    Attributes:
        tensors: by their names in the layer; they may be shards.
        linear: a linear layer or a convolution, whose weight an engine can verify.
        pair: merged into ``weight``; None where the tensors travel as they are.
        scale: of the pair.
    """

    tensors: Mapping[str, torch.Tensor]
    linear: bool
    pair: LayerPair | None = None
    scale: float = 1.0

    @property
    def needed(self) -> dict[str, torch.Tensor]:
        """All that the layer's tensors are made of, by name; A and B of a pair are ``a`` and ``b``."""
        return {**self.tensors, **(self.pair._asdict() if self.pair else {})}

    def to_send(self, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a tensor as it travels: a weight that has a pair is merged with it.

        Args:
            whole: `needed`, made whole.
        """
        if self.pair is None or name != "weight":
            return whole[name]
        return merged_weight(whole[name], LayerPair(*(whole[side] for side in LayerPair._fields)), self.scale)


def read_layers(
    model: nn.Module, adapter: TrainedAdapter | None = None, values: Mapping[str, torch.Tensor] | None = None
) -> dict[str, TrainedLayer]:
    """Return all layers of a model by prefix, under the names of its checkpoint: what PEFT adds is left out.

    Args:
        adapter: what is merged; None for a model without LoRA.
        values: in the place of those of the model, under the keys of its state dict: of every trained parameter.

    Raises:
        RequestError: the model has LoRA and no adapter is merged; it has no parameters; a pair has nothing to go into.
    """
    parameters = {unwrapped(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {unwrapped(name): module for name, module in model.named_modules(remove_duplicate=False)}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    state = model.state_dict()
    if values is not None:
        state = state | replacements(state, values, [n for n, each in model.named_parameters() if each.requires_grad])
    for key, tensor in state.items():
        bare = unwrapped(key)  # wrappers may stand in the names of parameters, and in these keys, or in one of them
        if bare not in parameters or is_adapter_key(bare):
            continue
        layer, _, name = bare.rpartition(".")
        layers.setdefault(layer.removesuffix(f".{BASE_LAYER}"), {})[name] = tensor
    if not layers:
        raise RequestError("the model has no parameters: nothing to send")
    if adapter is None and any(map(is_adapter_key, parameters)):
        raise RequestError("the model has LoRA, and base weights alone would be sent; use --use-lora")
    pairs, scales = (adapter.pairs, adapter.scales) if adapter else ({}, {})
    if lost := [layer for layer in pairs if layer not in scales or "weight" not in layers.get(layer, {})]:
        raise RequestError(f"layers with a pair, but without a weight or PEFT's scale: {name_some(lost)}")

    def is_linear(layer: str) -> bool:
        base = modules.get(f"{layer}.{BASE_LAYER}", modules.get(layer))
        return isinstance(base, (nn.Linear, *CONVOLUTIONS))

    return {
        layer: TrainedLayer(named, is_linear(layer), pairs.get(layer), scales.get(layer, 1.0))
        for layer, named in layers.items()
    }


def _faults_of(modules: NamedModules, adapter: str) -> list[str]:
    """Return why the pairs alone would not be the adapter, one sentence each."""
    faults: dict[str, None] = {}  # an ordered set: PEFT keeps a configuration in more than one module
    for name, module in modules:
        own = vars(module)
        if (config := _config(module, adapter)) is not None:
            if (bias := getattr(config, "bias", "none")) != "none":
                faults[f"adapter {adapter!r} trains biases (bias={bias!r}), which are not sent"] = None
            if getattr(config, "trainable_token_indices", None):
                faults[f"adapter {adapter!r} trains tokens of an embedding (trainable_token_indices)"] = None
            other = {field: value for field, value in vars(config).items() if field not in _NAMED_ELSEWHERE}
            for fault in variant_faults(other):
                faults[f"adapter {adapter!r} is more than A and B: {fault}"] = None
        if (variant := own.get("lora_variant", {}).get(adapter)) is not None:
            kind = type(variant).__name__.removesuffix("LinearVariant").removesuffix("Variant")
            faults[f"{name!r} of adapter {adapter!r} is {kind}, of which A and B are not all; it is not sent"] = None
        if adapter in own.get("merged_adapters", ()):
            faults[f"adapter {adapter!r} is merged into the trainer's own weights; call unmerge_adapter() first"] = None
    return [*faults, *several_active(modules, adapter)]


def _init_that_moved_the_base(modules: NamedModules, adapter: str) -> str | None:
    """Return the ``init_lora_weights`` that took B @ A off the base weights; None where they are the checkpoint's."""
    for _, module in modules:
        init = getattr(_config(module, adapter), "init_lora_weights", True)
        if not keeps_base(init):
            return str(init)
    return None


def _config(module: nn.Module, adapter: str) -> object:
    # not by getattr: what a module lacks, torch looks for in three places and then raises, for each of thousands
    return vars(module).get("peft_config", {}).get(adapter)
