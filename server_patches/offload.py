"""Weights that sglang keeps on the host: whole modules that it parks there, and layers that it streams from there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import is_layerwise_offloaded_module
from torch import nn


class HostWeights:
    """`sgld_lora_merge.targets.Offloaded` of a module whose weights lie on the host, while it computes on a device.

    Args:
        module: the module; some of its weights may lie on the device all the same.
        weight: a live local weight by name, wherever it lies.
        names: the weights that will be written; memory for the largest is allocated here.
        device: where merges are computed.
    """

    def __init__(
        self, module: Any, weight: Callable[[str], torch.Tensor], names: Collection[str], device: torch.device
    ) -> None:
        self._module = module
        self._weight = weight
        largest = max((weight(name).nbytes for name in names), default=0)
        self.device = device
        self._memory = torch.empty(largest, dtype=torch.uint8, device=device)

    def blank(self, name: str) -> torch.Tensor:
        weight = self._weight(name)
        return self._memory[: weight.nbytes].view(weight.dtype).view(weight.shape)

    @contextmanager
    def opened(self, name: str) -> Iterator[torch.Tensor]:
        live, manager = self._weight(name), _manager(self._module, name)
        merged = self.blank(name)
        merged.copy_(live)
        yield merged
        if manager is None:
            live.copy_(merged)
            # sglang keeps a host copy of what it may park, and would bring the old weight back
            parked: dict[str, torch.Tensor] = getattr(self._module, "_parked_non_layer_weights", {})
            parked.pop(name, None)
        elif name not in (manager.update_cpu_weights({name: merged.view_as(manager.get_cpu_weight(name))}) or ()):
            raise RuntimeError(f"the offload manager did not take {name!r}")


def is_layerwise(module: nn.Module) -> bool:
    """Whether sglang streams this module's layers from the host."""
    return bool(is_layerwise_offloaded_module(module))


def host_weight(module: nn.Module, name: str) -> torch.Tensor | None:
    """The host buffer that holds a streamed weight; None for one that lies on the device."""
    manager = _manager(module, name)
    return None if manager is None else manager.get_cpu_weight(name)


def unpark(module: Any) -> None:
    """Bring weights outside the streamed layers back to the device, if sglang has parked them."""
    if is_layerwise(module):
        module.restore_non_layer_weights()


def _manager(module: Any, name: str) -> Any:
    """The offload manager that holds a weight; None where none does."""
    if not is_layerwise(module):
        return None
    return next((manager for manager in module.layerwise_offload_managers if manager.has_cpu_weight(name)), None)
