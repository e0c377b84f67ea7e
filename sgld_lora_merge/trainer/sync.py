"""A sync: read the model, make its shards whole, send bucket by bucket, verify, report.

What is sent (`contents`) and how it travels (`handles`, `uploads`) are parts; this is the one loop that all strategies
run. Every rank runs it. What fails on one rank fails on all, and a sync that did nothing is never a success.
"""

from __future__ import annotations

import logging
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.trainer.base import BaseDiffers, BaseWeights, compare_base
from sgld_lora_merge.trainer.buckets import flattened_nbytes, plan_buckets, whole_nbytes
from sgld_lora_merge.trainer.gather import Gather, GatherAhead
from sgld_lora_merge.trainer.model import TrainedLayer
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper
from sgld_lora_merge.trainer.sync_update import Contents, NamedTensors, SyncUpdate, Travel
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER

ROUNDED = (
    "A and B have more precision than the engine's 0 mode computes with: it rounds them to its weights' dtype, as a "
    "forward under autocast does and as the trainer's own merge does; a merge of the unrounded ones would give other "
    "weights. SGLANG_DIFFUSION_LORA_MERGE_FP32=1 computes with them as they are"
)
LOGGED_SYNCS = 2  # the first ones of a run, in the log

logger = logging.getLogger(__name__)

Models = nn.Module | Mapping[str, nn.Module]


@dataclass(frozen=True)
class SyncReport:
    """A sync that is live on every engine.

    Attributes:
        version: of the weights. It counts attempts, failed ones included, from above what the engines have had.
        tensors, layers, buckets: how many were sent.
        nbytes: bytes of the tensors, once.
        seconds: by stage.
        answer: the first engine's last answer.
    """

    version: int
    tensors: int
    layers: int
    buckets: int
    nbytes: int
    seconds: Mapping[str, float]
    answer: Answer


class MakeContents(Protocol):
    def __call__(self, args: Namespace, mapper: PeftLoRAKeyMapper, allow_unsynced: Sequence[str], /) -> Contents: ...


class MakeTravel(Protocol):
    def __call__(
        self, args: Namespace, contents: Contents, transports: Sequence[Transport], gpus_per_engine: int, /
    ) -> Travel: ...


class WeightSync:
    """A way to bring the trainer's weights to the engines.

    Args:
        args: of `validate_lora_arguments`.
        model: the model of the target module, or one for each module of the pipeline.
        transports: one an engine.
        gpus_per_engine: ranks ``[i * g, (i + 1) * g)`` are on the GPUs of engine i.
        adapter: the PEFT adapter that is sent; the engine's default one is what it becomes.
        verify: compare the engine's weights after every sync; None asks ``SGLD_LORA_VERIFY``. May be changed later.
        gather: makes one shard whole, for other shardings than DTensor. Where it fails on one rank it must fail on all.
        allow_unsynced: patterns (``*.norm.weight``) of parameters that are trained, or that the engine has otherwise,
            although a LoRA sync does not send them.

    Attributes:
        version: that is live on the engines, as far as this object knows; 0 before the first sync.
    """

    log_name: ClassVar[str]
    contents: ClassVar[MakeContents]
    travel: ClassVar[MakeTravel]

    def __init__(
        self,
        args: Namespace,
        model: Models,
        transports: Transport | Sequence[Transport],
        *,
        gpus_per_engine: int = 1,
        adapter: str = DEFAULT_ADAPTER,
        verify: bool | None = None,
        gather: Gather | None = None,
        allow_unsynced: Sequence[str] = (),
    ) -> None:
        self.args = args
        self.version = 0
        self.verify = settings_from().verify if verify is None else verify
        self._models = model if isinstance(model, Mapping) else {args.update_weight_target_module: model}
        self._gather = gather
        self._contents = type(self).contents(args, PeftLoRAKeyMapper(adapter), tuple(allow_unsynced))
        engines = list(transports) if isinstance(transports, Sequence) else [transports]
        self._travel = type(self).travel(args, self._contents, engines, gpus_per_engine)
        self._engines = self._travel.engines
        self._number: int | None = None  # the last version that was tried
        self._compared: object = None  # the state of the base weights that the engines were found to have
        self._values: dict[str, Mapping[str, torch.Tensor]] | None = None
        self._merged_into: object = None  # what each engine said of its base weights
        self._logged, self._warned = 0, False

    @contextmanager
    def sending(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Send these values inside, an average or an old policy; the model's own are neither read nor changed.

        Args:
            values: of every tensor that is sent, or for full weights of every one that is trained, under the names of
                the model's parameters; with several modules by module. Whole tensors, or shards like the model's.
        """
        nested = any(isinstance(each, Mapping) for each in values.values())
        self._values = dict(values) if nested else dict.fromkeys(self._models, values)
        try:
            yield
        finally:
            self._values = None

    def update_weights(self) -> SyncReport:
        """Bring the model's present values to every engine. A collective: every rank calls it.

        Raises:
            RequestError: the model cannot be sent: nothing in it, keys without a place, half a pair, DoRA, biases.
            SyncError: an engine refused, or failed, or its weights are not what they should be.
        """
        engines = self._engines
        modules, buckets = engines.run_on_all_ranks(self._prepare)
        if self._number is None:
            self._number = engines.highest_version()
        base = self._base_of(modules)
        state = [(name, each.state) for name, each in base.items()]
        agreed = engines.ranks.gather((uuid.uuid4().hex, state != self._compared))
        update = SyncUpdate(self._number + 1, agreed[0][0], modules, buckets)
        if engines.detect_stock_engines():
            if faults := self._faults_on_stock(update):
                raise RequestError(*(f"an engine has no sgld-lora-merge: {fault}" for fault in faults))
        elif any(changed for _, changed in agreed):
            try:
                self._compare_base(update, base)
            except SyncError as error:
                raise SyncError(f"nothing was sent: {error}") from error
            self._compared = state
        self._number = update.version
        with update.stage("send"):
            answers = self._send(update)
        self.version = update.version
        self._heed(answers, update, base)
        if self.verify:
            with update.stage("verify"):
                engines.verify(self._contents.expectations(update, answers[0], engines, self._gather))
        self._log(update)
        tensors = [tensor for layers in self._layers(update).values() for each in layers.values() for tensor in each]
        return SyncReport(
            update.version,
            len(tensors),
            sum(map(len, self._layers(update).values())),
            len(update.buckets),
            sum(map(whole_nbytes, tensors)),
            update.seconds,
            answers[0],
        )

    def _base_of(self, modules: Mapping[str, Any]) -> dict[str, BaseWeights]:
        """Return what the engines must have already, by module."""
        base = {name: self._contents.base(module) for name, module in modules.items()}
        return {name: each for name, each in base.items() if each is not None}

    def _compare_base(self, update: SyncUpdate, base: Mapping[str, BaseWeights]) -> None:
        """Compare the base weights: before the first sync, and where something has written to them since."""
        with update.stage("base"):
            try:
                compare_base(base, self._engines, self._gather)
            except BaseDiffers as error:
                raise BaseDiffers(f"{self._contents.base_fault(update)}. {error}") from error

    def _heed(self, answers: Sequence[Answer], update: SyncUpdate, base: Mapping[str, BaseWeights]) -> None:
        """Compare the base weights again where an engine says that it merges into others than before."""
        modules = [answer.get("modules") or {} for answer in answers]
        merged_into = [{name: each.get("base") for name, each in of_engine.items()} for of_engine in modules]
        if base and self._merged_into not in (None, merged_into):
            try:
                self._compare_base(update, base)
            except SyncError as error:
                raise SyncError(
                    f"version {update.version} is live, but something has replaced base weights: {error}"
                ) from error
        self._merged_into = merged_into
        if not self._warned and any(answer.get("pairs_rounded") for answer in answers):
            self._warned = True
            if self._engines.ranks.rank == 0:
                logger.warning(ROUNDED)

    def _prepare(self) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
        """Read all modules and plan the buckets."""
        modules: dict[str, Any] = {}
        faults: list[str] = []
        for name, model in self._models.items():
            try:
                modules[name] = self._contents.read(model, None if self._values is None else self._values.get(name, {}))
            except RequestError as error:
                faults.extend(f"{name}: {fault}" for fault in error.faults)
                continue
            layers = self._contents.layers(modules[name])
            if empty := [layer for layer, each in layers.items() if not all(map(whole_nbytes, each.tensors.values()))]:
                when = "a parameter of DeepSpeed's ZeRO-3 is, outside of GatheredParameters"
                faults.append(f"{name}: layers with an empty tensor ({when}): {name_some(empty)}")
        if faults:
            raise RequestError(*faults)
        buckets = [
            (name, bucket)
            for name, module in modules.items()
            for bucket in plan_buckets(
                {name: flattened_nbytes(each.tensors.values()) for name, each in self._contents.layers(module).items()},
                self.args.update_weight_buffer_size,
            )
        ]
        return modules, buckets

    def _send(self, update: SyncUpdate) -> list[Answer]:
        """Send all buckets. While one travels the next one is gathered, and no other is in memory."""
        layers = {name: self._contents.layers(module) for name, module in update.modules.items()}
        needed = (_needed(layers[module], bucket) for module, bucket in update.buckets)
        gathered = GatherAhead(needed, self._gather)
        steps = len(update.buckets) + self._travel.extra_steps
        title = f"{self.log_name} weight sync v{update.version}"
        with progress(title, steps, shown=self._engines.ranks.rank == 0) as step:
            try:
                self._engines.run_on_all_ranks(gathered.prepare)
                gathered.start()
                for index, (module, bucket) in enumerate(update.buckets):
                    self._travel.send(update, index, _Bucket(layers[module], bucket, gathered))
                    step()
            except Exception:
                self._travel.abort(update)
                raise
            return self._travel.finish(update, step)

    def _faults_on_stock(self, update: SyncUpdate) -> list[str]:
        verified = ["verify=True asks for a route of its own"] if self.verify else []
        return [*self._travel.faults_on_stock, *verified, *self._contents.faults_on_stock(update)]

    def _layers(self, update: SyncUpdate) -> dict[str, dict[str, list[torch.Tensor]]]:
        """Return what travels, by module and layer."""
        return {
            name: {layer: list(each.tensors.values()) for layer, each in self._contents.layers(module).items()}
            for name, module in update.modules.items()
        }

    def _log(self, update: SyncUpdate) -> None:
        if self._engines.ranks.rank or self._logged == LOGGED_SYNCS:
            return
        self._logged += 1
        for module, layers in self._layers(update).items():
            logger.info(
                "%s weight sync v%d [%s]: pushed %d %s, %d layer prefixes in %d buckets (unmapped=0)",
                self.log_name, update.version, module, sum(map(len, layers.values())), self._contents.noun, len(layers),
                sum(name == module for name, _ in update.buckets),
            )  # fmt: skip
            logger.info("among them %s", ", ".join(list(layers)[:: max(1, len(layers) // 3)][:3]))


def _needed(layers: Mapping[str, TrainedLayer], bucket: Sequence[str]) -> list[tuple[tuple[str, str], torch.Tensor]]:
    """Return all tensors that a bucket is made of, perhaps sharded, by layer and name."""
    return [((layer, name), tensor) for layer in bucket for name, tensor in layers[layer].needed.items()]


class _Bucket:
    """A bucket under the names of the wire; implements `GatheredBucket`."""

    def __init__(
        self, layers: Mapping[str, TrainedLayer], bucket: Sequence[str], gathered: GatherAhead[tuple[str, str]]
    ) -> None:
        self._layers, self._bucket = layers, bucket
        self._gathered = gathered
        self.prepare_next, self.start_next = gathered.prepare, gathered.start

    def take(self) -> NamedTensors:
        whole = self._gathered.take()
        named: NamedTensors = []
        for layer in self._bucket:
            each = self._layers[layer]
            own = {name: whole.pop((layer, name)) for name in each.needed}
            named += [(f"{layer}.{name}" if layer else name, each.to_send(name, own)) for name in each.tensors]
        return named


@contextmanager
def progress(title: str, steps: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a bar to whoever waits at a terminal; yield what is called after each step.

    Args:
        steps: how many there are; one alone needs no bar.
        shown: whether this rank is the one that shows it.
    """
    if not (shown and steps > 1 and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda: bar.advance(task)
