"""What every LoRA strategy does: read the adapter, make shards whole, send, verify, report.

Every rank runs it. What fails on one rank fails on all, and a sync that did nothing is never a success.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from sgld_lora_merge.adapters import DEFAULT_ADAPTER
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.trainer.buckets import flattened_nbytes, plan_buckets
from sgld_lora_merge.trainer.expected import Expectation, expected_base, expected_merged
from sgld_lora_merge.trainer.gather import Gather, gather_ahead, whole
from sgld_lora_merge.trainer.model import TrainedAdapter, read_adapter, scales_of_their_own
from sgld_lora_merge.trainer.names import LayerPair, PeftLoRAKeyMapper
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.transport import STATUS_ROUTE, Answer, SyncError, Transport

VERIFY_VARIABLE = "SGLD_LORA_VERIFY"
LOGGED_VERSIONS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Models = nn.Module | Mapping[str, nn.Module]
NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class SyncReport:
    """A sync that is live on every engine.

    Attributes:
        version: of the weights, counted from 1.
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


@dataclass(frozen=True, eq=False)
class Update:
    """One sync on its way.

    Attributes:
        update_id: the same on all ranks and for all engines.
        modules: what is sent.
        scaling: module -> layer -> scale, where alpha / rank does not say it.
        buckets: module and layers of each.
        seconds: by stage.
    """

    version: int
    update_id: str
    modules: Mapping[str, TrainedAdapter]
    scaling: Mapping[str, Mapping[str, float]]
    buckets: Sequence[tuple[str, list[str]]]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class LoRASync:
    """What the LoRA strategies share: read, gather, send, verify.

    Args:
        args: of `validate_lora_arguments`.
        model: the PEFT model of the target module, or one for each module of the pipeline.
        transports: one an engine.
        gpus_per_engine: ranks ``[i * g, (i + 1) * g)`` are on the GPUs of engine i.
        adapter: the PEFT adapter that is sent; the engine's default one is what it becomes.
        verify: compare the engine's weights after every sync, the base weights after the first one; None asks
            ``SGLD_LORA_VERIFY``.
        gather: makes one shard whole, for other shardings than DTensor.
    """

    log_name: str

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
    ) -> None:
        self.args = args
        self.version = 0
        self._models = model if isinstance(model, Mapping) else {args.update_weight_target_module: model}
        self._transports = list(transports) if isinstance(transports, Sequence) else [transports]
        self._mapper = PeftLoRAKeyMapper(adapter)
        self._verify = os.environ.get(VERIFY_VARIABLE) == "1" if verify is None else verify
        self._gather = gather
        self._ranks = self._make_ranks(gpus_per_engine)

    def update_weights(self) -> SyncReport:
        """Bring the adapter's present values to every engine. A collective: every rank calls it.

        Raises:
            RequestError: the adapter cannot be sent: nothing in it, keys without a place, half a pair, DoRA, biases.
            SyncError: an engine refused, or failed, or its weights are not what they should be.
        """
        update_id = self._ranks.everyone(uuid.uuid4().hex)[0]
        update = self._together(partial(self._prepare, update_id))
        if self.version == 0:
            self._together(self._look)
        with update.stage("send"):
            answers = self._send(update)
        self.version = update.version
        if self._verify:
            with update.stage("verify"):
                self._check(update, answers[0])
        tensors = [side for each in update.modules.values() for pair in each.pairs.values() for side in pair]
        report = SyncReport(
            update.version,
            len(tensors),
            len(tensors) // 2,
            len(update.buckets),
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            update.seconds,
            answers[0],
        )
        self._log(update)
        return report

    def _make_ranks(self, gpus_per_engine: int) -> Ranks:
        return Ranks(len(self._transports), gpus_per_engine)

    def _send(self, update: Update) -> list[Answer]:
        """Send all buckets; the last answer of every engine, on every rank."""
        raise NotImplementedError

    def _called(self) -> list[Transport]:
        """The engines that this rank calls."""
        return [] if self._ranks.engine is None else [self._transports[self._ranks.engine]]

    def _together(self, work: Callable[[], Result]) -> Result:
        """Run it on every rank; what fails on one rank fails on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # whatever it is, the other ranks wait
            error = raised
        told = self._ranks.everyone(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, fault in enumerate(told):
            if fault is not None:
                raise SyncError(f"rank {rank}: {fault}")
        return result  # type: ignore[return-value]  # there was no error

    def _prepare(self, update_id: str) -> Update:
        modules: dict[str, TrainedAdapter] = {}
        faults: list[str] = []
        for name, model in self._models.items():
            try:
                modules[name] = read_adapter(model, self._mapper)
            except RequestError as error:
                faults.extend(f"{name}: {fault}" for fault in error.faults)
        if faults:
            raise RequestError(*faults)
        alpha, rank = self.args.lora_alpha, self.args.lora_rank
        scaling = {name: scales_of_their_own(each, alpha, rank) for name, each in modules.items()}
        buckets = [
            (name, layers)
            for name, each in modules.items()
            for layers in plan_buckets(
                {layer: flattened_nbytes(pair) for layer, pair in each.pairs.items()},
                self.args.update_weight_buffer_size,
            )
        ]
        return Update(self.version + 1, update_id, modules, scaling, buckets)

    def _look(self) -> None:
        """Whether the engine knows this contract at all; an engine without the plugin ignores half of the fields."""
        for transport in self._called():
            try:
                transport.ask(STATUS_ROUTE)
            except SyncError as error:
                raise SyncError(f"is sgld-lora-merge installed in the engine, and the engine well? {error}") from error

    def _whole_buckets(self, update: Update) -> Iterator[tuple[str, list[str], NamedTensors]]:
        """Module, layers, and whole tensors under the names of the wire, one bucket after the other."""
        sharded = (
            [
                (f"{layer}.lora_{side}", tensor)
                for layer in layers
                for side, tensor in zip("AB", update.modules[module].pairs[layer], strict=True)
            ]
            for module, layers in update.buckets
        )
        for (module, layers), named in zip(update.buckets, gather_ahead(sharded, self._gather), strict=True):
            yield module, layers, named

    def _check(self, update: Update, answer: Answer) -> None:
        """Ask the engines whether their weights are what they must be."""
        live = {name for name, each in answer["modules"].items() if each["merge_mode"] == "merge"}
        if unmerged := sorted(update.modules.keys() - live):
            logger.warning("the engine adds %s at run time: only base weights are verified there", unmerged)
        precision, dtype = Precision(answer["merge_precision"]), DTYPES[self.args.diffusion_forward_dtype]
        merged: dict[str, dict[str, Expectation]] = {}
        base: dict[str, dict[str, Expectation]] = {}
        for module, adapter in update.modules.items():
            for layer, pair in adapter.pairs.items():
                if layer not in adapter.base:
                    raise RequestError(f"{module}: {layer!r} cannot be verified: the model has no base weight for it")
                weight = whole(adapter.base[layer], self._gather)
                sides = LayerPair(*(whole(side, self._gather) for side in pair))
                if not self._called():
                    continue
                if update.version == 1 or module not in live:
                    base.setdefault(module, {})[layer] = expected_base(weight, dtype)
                if module in live:
                    scale = self._scale(adapter, layer)
                    each = expected_merged(weight, sides, scale, dtype, precision, update.version)
                    merged.setdefault(module, {})[layer] = each

        def ask() -> None:
            for transport in self._called():
                for weights, modules in (("base", base), ("live", merged)):
                    if modules:
                        transport.ask("/lora_merge/verify", {"modules": modules, "weights": weights})

        self._together(ask)

    def _scale(self, adapter: TrainedAdapter, layer: str) -> float:
        rank = adapter.pairs[layer].a.shape[0]
        alpha = rank if self.args.lora_alpha is None else self.args.lora_alpha
        return adapter.scales.get(layer, alpha / rank)

    def _log(self, update: Update) -> None:
        if self._ranks.rank or update.version > LOGGED_VERSIONS:
            return
        for module, adapter in update.modules.items():
            layers = list(adapter.pairs)
            count = sum(name == module for name, _ in update.buckets)
            logger.info(
                "%s weight sync v%d [%s]: pushed %d lora tensors, %d layer prefixes in %d buckets (unmapped=0)",
                self.log_name, update.version, module, 2 * len(layers), len(layers), count,
            )  # fmt: skip
            logger.info("%s", ", ".join(layers[:: max(1, len(layers) // 3)][:3]))
