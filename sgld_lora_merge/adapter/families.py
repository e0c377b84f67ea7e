"""Model families: one YAML each in ``configs/``, and the routes from prefixes of tensor names to modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import permutations
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sgld_lora_merge.adapter.names import layer_name
from sgld_lora_merge.errors import LoraMergeError, RequestError, in_short, summarise

CONFIGS = resources.files("sgld_lora_merge") / "configs"

_Name = Annotated[str, Field(min_length=1)]
Value = TypeVar("Value")


class Family(BaseModel):
    """What is the same for all models of one architecture; ``configs/wan2_2.yaml`` explains every field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model_id: _Name
    trainer_class: _Name
    engine_class: _Name
    target_modules: list[_Name] = Field(min_length=1)
    rank: int = Field(ge=1)
    alpha: float = Field(allow_inf_nan=False)
    forward_dtype: Literal["fp32", "bf16", "fp16"]
    buffer_size: int = Field(ge=1)
    routes: dict[str, _Name] = {}

    @field_validator("routes")
    @classmethod
    def _unambiguous(cls, routes: dict[str, str]) -> dict[str, str]:
        if bad := [prefix for prefix in routes if not prefix.strip(".") or not prefix.endswith(".")]:
            raise ValueError(f"a prefix is a name and a dot, not {bad}")
        if nested := [pair for pair in permutations(routes, 2) if pair[0].startswith(pair[1])]:
            raise ValueError(f"no prefix may start with another one: {nested}")
        return routes


def load_families(folder: Traversable = CONFIGS) -> dict[str, Family]:
    """Return all families of a folder, by the name of their file without ``.yaml``.

    Raises:
        LoraMergeError: with everything that is wrong, each fault with its file.
    """
    families: dict[str, Family] = {}
    faults: list[str] = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".yaml"):
            continue
        try:
            family = Family.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            faults.append(f"{file.name} is not YAML: {' '.join(str(error).split())}")
        except ValidationError as error:
            faults.extend(
                f"{file.name}: {'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
        else:
            faults.extend(
                f"{file.name}: {name}.yaml has engine_class {family.engine_class} and other routes"
                for name, other in families.items()
                if other.engine_class == family.engine_class and {} != other.routes != family.routes != {}
            )
            families[file.name.removesuffix(".yaml")] = family
    if faults:
        raise LoraMergeError(summarise(faults))
    return families


def routes_of(engine_class: type, families: Mapping[str, Family]) -> Mapping[str, str]:
    """Return prefix -> module for a class, or for the nearest base that has any (wrappers like FSDP's make subclasses).

    Families of one class have the same routes or none: a model that lacks a module of theirs is sent no such prefix.
    """
    by_class = {family.engine_class: family.routes for family in families.values() if family.routes}
    return next((by_class[base.__name__] for base in engine_class.__mro__ if base.__name__ in by_class), {})


def route(
    by_module: Mapping[str, Collection[tuple[str, Value]]],
    routes: Mapping[str, str],
    allowed: Collection[str] | None = None,
) -> Mapping[str, Collection[tuple[str, Value]]]:
    """Give every named value to the module of its name's prefix, without the prefix, or else leave it where it is.

    What PEFT puts in front of a name may stand in front of the prefix or behind it.

    Args:
        by_module: module -> values by tensor name, or by layer prefix.
        routes: prefix -> module.
        allowed: modules that the request names; None allows every one.

    Returns:
        Module -> its values; modules that have none are left out.

    Raises:
        RequestError: prefixes whose module is not allowed.
    """
    if not routes:
        return {module: named for module, named in by_module.items() if named}
    routed: dict[str, list[tuple[str, Value]]] = {}
    refused: dict[str, str] = {}
    for module, named in by_module.items():
        for name, value in named:
            bare = layer_name(name)
            prefix = next((prefix for prefix in routes if bare.startswith(prefix)), None)
            if prefix is None:
                routed.setdefault(module, []).append((name, value))
            elif allowed is not None and routes[prefix] not in allowed:
                refused.setdefault(prefix, name)
            else:
                routed.setdefault(routes[prefix], []).append((bare.removeprefix(prefix), value))
    if refused:
        raise RequestError(
            *(
                f"{in_short(name)} belongs to module {routes[prefix]!r}, as every name with the prefix {prefix!r} does;"
                f" the request names {', '.join(sorted(allowed or ()))} only"
                for prefix, name in refused.items()
            )
        )
    return routed


def route_layers(
    by_module: Mapping[str, Mapping[str, Value]], routes: Mapping[str, str], allowed: Collection[str] | None = None
) -> dict[str, dict[str, Value]]:
    """Route one value for each layer, as `route` does tensors.

    Raises:
        RequestError: as `route`; or a layer has two values, one with the prefix and one without.
    """
    routed = route({module: layers.items() for module, layers in by_module.items()}, routes, allowed)
    twice = [
        f"{module} has two entries for layer {in_short(name)}, one with the prefix of a route and one without"
        for module, layers in routed.items()
        for name, count in Counter(name for name, _ in layers).items()
        if count > 1
    ]
    if twice:
        raise RequestError(*twice)
    return {module: dict(layers) for module, layers in routed.items()}
