"""Weights that sglang keeps on the host: whole modules that it parks there, and layers that it streams from there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import is_layerwise_offloaded_module
from torch import nn

from sgld_lora_merge.merge.spans import Span

Parts = Sequence[tuple[torch.Tensor, torch.Tensor]]  # destination and source of each copy


class HostWeights:
    """Implements `merge.module_view.Offloaded`: the weights lie on the host, and the module computes on a device.

    Args:
        module: the module; some of its weights may lie on the device all the same.
        weight: a live local weight by name, wherever it lies.
        names: the weights that will be written; memory for the largest, twice on both sides, is allocated here.
        device: where merges are computed.
    """

    def __init__(
        self, module: Any, weight: Callable[[str], torch.Tensor], names: Collection[str], device: torch.device
    ) -> None:
        self._module = module
        self._weight = weight
        largest = max((weight(name).nbytes for name in names), default=0)
        self.device = device
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0
        parked = [name for name in names if _manager(module, name) is None and weight(name).device.type != device.type]
        nbytes = max((weight(name).nbytes for name in parked), default=0)
        self._through_pinned = _CopyThroughPinned(nbytes, device) if nbytes else None

    def blank(self, name: str) -> torch.Tensor:
        return _view_like(self._memory[self._turn], self._weight(name))

    @contextmanager
    def opened(self, name: str, rows: Sequence[Span]) -> Iterator[torch.Tensor]:
        live, manager = self._weight(name), _manager(self._module, name)
        self._turn = 1 - self._turn  # the other memory may still be copied to the host
        merged = self.blank(name)
        if manager is not None and sum(span.size for span in rows) < live.shape[0]:
            merged.copy_(live)  # the manager takes whole weights
        yield merged
        if manager is not None:
            if name not in (manager.update_cpu_weights({name: merged.view_as(manager.get_cpu_weight(name))}) or ()):
                raise RuntimeError(f"the offload manager did not take {name!r}")
            return
        parts = [(live[span.start : span.stop], merged[span.start : span.stop]) for span in rows]
        if self._through_pinned is None or live.device.type == self.device.type:
            _copy(parts)
        else:
            self._through_pinned.send(parts)
        # sglang keeps a host copy of what it may park, and would bring the old weight back
        parked: dict[str, torch.Tensor] = getattr(self._module, "_parked_non_layer_weights", {})
        parked.pop(name, None)

    def finish(self) -> None:
        if self._through_pinned is not None:
            self._through_pinned.finish()


class _CopyThroughPinned:
    """Copies merged weights to pageable memory through pinned memory. While one is copied, the next is merged.

    A GPU copies into pageable memory far below its link's speed (benchmarks/results/sync.md).
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)
        self._waiting: tuple[torch.cuda.Event, Parts] | None = None

    def send(self, parts: Parts) -> None:
        """Start the copy of one weight, and finish that of the weight before it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        start, arriving = 0, []
        with torch.cuda.stream(self._stream):
            for live, merged in parts:
                place = _view_like(self._pinned[0][start:], live)
                place.copy_(merged, non_blocking=True)
                arriving.append((live, place))
                start += live.nbytes
            arrival = self._stream.record_event()
        self.finish()
        self._waiting = arrival, arriving
        self._pinned.reverse()

    def finish(self) -> None:
        if self._waiting is not None:
            (arrival, parts), self._waiting = self._waiting, None
            arrival.synchronize()
            _copy(parts)


def _view_like(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _copy(parts: Parts) -> None:
    with torch.inference_mode():
        for live, merged in parts:
            live.copy_(merged)


def is_layerwise(module: nn.Module) -> bool:
    """Return whether sglang streams this module's layers from the host."""
    return bool(is_layerwise_offloaded_module(module))


def host_weight(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the host buffer that holds a streamed weight; None for one that lies on the device."""
    manager = _manager(module, name)
    return None if manager is None else manager.get_cpu_weight(name)


def unpark(module: Any) -> None:
    """Bring weights outside the streamed layers back to the device, if sglang has parked them."""
    if is_layerwise(module):
        module.restore_non_layer_weights()


def _manager(module: Any, name: str) -> Any:
    """Return the offload manager that holds a weight; None where none does."""
    if not is_layerwise(module):
        return None
    return next((manager for manager in module.layerwise_offload_managers if manager.has_cpu_weight(name)), None)
