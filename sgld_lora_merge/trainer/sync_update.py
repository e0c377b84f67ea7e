"""An update of the trainer's, and the two parts that make a strategy: what is sent, and how it travels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from sgld_lora_merge.trainer.base import BaseWeights
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.expected import Expectation
from sgld_lora_merge.trainer.gather import Gather
from sgld_lora_merge.trainer.model import TrainedLayer
from sgld_lora_merge.trainer.transport import Answer, SyncError

NamedTensors = list[tuple[str, torch.Tensor]]
Expectations = Mapping[str, Mapping[str, Mapping[str, Expectation]]]  # "live" or "base" -> module -> layer


@dataclass(frozen=True, eq=False)
class SyncUpdate:
    """What one sync sends.

    Attributes:
        update_id: the same on all ranks and for all engines.
        modules: what `Contents.read` returned, by module.
        buckets: module and layers of each.
        seconds: by stage.
    """

    version: int
    update_id: str
    modules: Mapping[str, Any]
    buckets: Sequence[tuple[str, list[str]]]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


class Contents(Protocol):
    """What is sent of a model.

    Attributes:
        noun: of one tensor, for the log.
        transactional: the engine takes it in transactions: all buckets and all engines go live together.
    """

    noun: str
    transactional: bool

    def read(self, model: nn.Module, values: Mapping[str, torch.Tensor] | None) -> Any:
        """Read what is sent of one module.

        Args:
            values: in the place of the model's, under the keys of its state dict; None for those of the model.

        Raises:
            RequestError: it cannot be sent, or is not all that was trained.
        """

    def layers(self, module: Any) -> Mapping[str, TrainedLayer]:
        """Return the layers of what `read` returned, by prefix."""

    def fields(self, update: SyncUpdate, module: str, layers: Sequence[str], *, stock: bool) -> dict[str, Any]:
        """Return what a request with these layers says beside its payload."""

    def faults_on_stock(self, update: SyncUpdate) -> list[str]:
        """Return what this sync needs and an engine without the plugin does not have."""

    def base(self, module: Any) -> BaseWeights | None:
        """Return the base weights that the engine must have already; None where they are sent."""

    def base_fault(self, update: SyncUpdate) -> str:
        """Return what is known of the trainer's base weights, and the way out, where the engine has others."""

    def expectations(self, update: SyncUpdate, answer: Answer, engines: Engines, gather: Gather | None) -> Expectations:
        """Return what the engines' weights must be, on ranks that call an engine. A collective."""


class GatheredBucket(Protocol):
    """One bucket whose tensors are on their way to be whole, and the one after it.

    `take` and `prepare_next` may fail on one rank: they are called where all ranks hear of it.
    """

    def take(self) -> NamedTensors:
        """Wait, and return whole tensors under the names of the wire; nothing else refers to them."""

    def prepare_next(self) -> None:
        """Allocate for the next bucket, as soon as the tensors of this one are needed no more."""

    def start_next(self) -> None:
        """Begin to gather it. A collective."""


class Travel(Protocol):
    """How the contents travel to the engines.

    Attributes:
        engines: those that it travels to.
        extra_steps: of progress, after those of the buckets.
        faults_on_stock: why it does not reach an engine without the plugin.
    """

    engines: Engines
    extra_steps: int
    faults_on_stock: Sequence[str]

    def send(self, update: SyncUpdate, index: int, bucket: GatheredBucket) -> None:
        """Send one bucket. A collective.

        Args:
            index: of the bucket.
        """

    def finish(self, update: SyncUpdate, step: Callable[[], None]) -> list[Answer]:
        """Make it live on all engines; return the last answer of every engine, on every rank. A collective."""

    def abort(self, update: SyncUpdate) -> None:
        """Free what engines keep of an update whose sending failed."""


@contextmanager
def parts_are_live(sent: int, update: SyncUpdate) -> Iterator[None]:
    """Surround a bucket of a sync that has no transaction: what fails says how much of it is live."""
    try:
        yield
    except SyncError as error:
        live = f"{sent} of {len(update.buckets)} buckets are live on the engines before this one failed"
        raise SyncError(f"{live}: {error}") from error
