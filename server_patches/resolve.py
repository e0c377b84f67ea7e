"""Find where layers would land, by the sender's names. No weight is read or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sgld_lora_merge.adapter.families import route
from sgld_lora_merge.adapter.names import layer_name
from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.merge.module_view import ModuleView
from sgld_lora_merge.merge.targets import CannotLand


def resolve(
    layers: Mapping[str, Iterable[str]], routes: Mapping[str, str], views: Mapping[str, ModuleView]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return module -> layer prefix -> its place, or why it has none.

    A place has the module, the layer's name there without a route's prefix, the name of the weight, the sections of it
    (none for the whole weight), the shape that ``lora_B @ lora_A`` must have, the weight's dtype, and whether it is
    merged or gets a low-rank branch.

    Args:
        layers: module -> layer prefixes in the sender's names, with the prefix of a route or without.
        routes: prefix -> module.

    Raises:
        RequestError: a module does not exist.
    """
    if unknown := [module for module in layers if module not in views]:
        raise RequestError(f"no module {name_some(unknown)} here; there are {name_some(sorted(views))}")
    return {module: {name: _place(module, name, routes, views) for name in names} for module, names in layers.items()}


def _place(module: str, name: str, routes: Mapping[str, str], views: Mapping[str, ModuleView]) -> dict[str, Any]:
    ((module, ((name, _),)),) = route({module: [(name, None)]}, routes).items()
    if module not in views:
        return {"fault": f"it belongs to module {module!r}, which this engine does not have"}
    try:
        landing = views[module].land(layer_name(name))
    except CannotLand as error:
        return {"fault": str(error)}
    if landing is None:
        return {"fault": "unknown layer"}
    first = landing.targets[0]
    weight = views[module].weight(first.weight)
    whole = sum(target.rows.size for target in landing.targets) == weight.shape[0]
    return {
        "module": module,
        "layer": layer_name(name),
        "weight": first.weight,
        "sections": [] if whole else [target.section for target in landing.targets],
        "shape": [landing.out_features, landing.in_features],
        "dtype": str(weight.dtype).removeprefix("torch."),
        "merge_mode": "dynamic" if first.dynamic else "merge",
    }
