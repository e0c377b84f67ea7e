"""What every strategy does: read the model, make shards whole, send, verify, report.

Every rank runs it. What fails on one rank fails on all, and a sync that did nothing is never a success.
"""

from __future__ import annotations

import logging
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.merge.resident import DEFAULT_ADAPTER
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.trainer.buckets import flattened_nbytes, plan_buckets, whole_nbytes
from sgld_lora_merge.trainer.expected import Expectation
from sgld_lora_merge.trainer.gather import Gather
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper
from sgld_lora_merge.trainer.progress import progress
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.transport import STATUS_ROUTE, Answer, SyncError, Transport

LOGGED_VERSIONS = 2
VERIFY_ROUTE = "/lora_merge/verify"
STOCK = (
    f"an engine has no sgld-lora-merge: it answers {STATUS_ROUTE} with 404. It cannot be promised then that an answer "
    "of 200 means that every name was known and every rank has it; that a sync which fails changed nothing; that "
    "buckets and engines go live together; that full weights reach layers which have had LoRA. Nothing is verified, "
    "no weight_version is kept, and a lost answer is not asked for again"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Content = TypeVar("Content")  # what a strategy reads of one module
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
class Update(Generic[Content]):
    """One sync on its way.

    Attributes:
        update_id: the same on all ranks and for all engines.
        modules: what is sent.
        buckets: module and layers of each.
        seconds: by stage.
    """

    version: int
    update_id: str
    modules: Mapping[str, Content]
    buckets: Sequence[tuple[str, list[str]]]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


class WeightSync(Generic[Content]):
    """A way to bring the trainer's weights to the engines.

    Args:
        args: of `validate_lora_arguments`.
        model: the model of the target module, or one for each module of the pipeline.
        transports: one an engine.
        gpus_per_engine: ranks ``[i * g, (i + 1) * g)`` are on the GPUs of engine i.
        adapter: the PEFT adapter that is sent; the engine's default one is what it becomes.
        verify: compare the engine's weights after every sync; None asks ``SGLD_LORA_VERIFY``. May be changed later.
        gather: makes one shard whole, for other shardings than DTensor.
    """

    log_name: str
    what: str

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
        self.verify = settings_from().verify if verify is None else verify
        self._gather = gather
        self._ranks = self._make_ranks(gpus_per_engine)
        self._stock: bool | None = None  # whether an engine has no plugin; None until one was asked

    def update_weights(self) -> SyncReport:
        """Bring the model's present values to every engine. A collective: every rank calls it.

        Raises:
            RequestError: the model cannot be sent: nothing in it, keys without a place, half a pair, DoRA, biases.
            SyncError: an engine refused, or failed, or its weights are not what they should be.
        """
        update_id = self._ranks.everyone(uuid.uuid4().hex)[0]
        update = self._together(partial(self._prepare, update_id))
        if self._stock is None:
            self._stock = self._look()
        if self._stock and (faults := self._beyond_stock(update)):
            raise RequestError(*(f"an engine has no sgld-lora-merge: {fault}" for fault in faults))
        if self.version == 0:
            self._before_the_first(update)
        told = f"{self.log_name} weight sync v{update.version}"
        with update.stage("send"), progress(told, self._steps(update), shown=self._ranks.rank == 0) as step:
            answers = self._send(update, step)
        self.version = update.version
        if self.verify:
            with update.stage("verify"):
                self._check(update, answers[0])
        layers = [tensors for each in update.modules.values() for tensors in self._tensors(each).values()]
        self._log(update)
        return SyncReport(
            update.version,
            sum(map(len, layers)),
            len(layers),
            len(update.buckets),
            sum(whole_nbytes(tensor) for tensors in layers for tensor in tensors),
            update.seconds,
            answers[0],
        )

    def _read(self, model: nn.Module) -> Content:
        """What is sent of one module.

        Raises:
            RequestError: it cannot be sent.
        """
        raise NotImplementedError

    def _tensors(self, content: Content) -> Mapping[str, Sequence[torch.Tensor]]:
        """What travels of every layer, perhaps sharded."""
        raise NotImplementedError

    def _send(self, update: Update[Content], step: Callable[[], None]) -> list[Answer]:
        """Send all buckets, with a step after each; the last answer of every engine, on every rank."""
        raise NotImplementedError

    def _check(self, update: Update[Content], answer: Answer) -> None:
        """Ask the engines whether their weights are what they must be."""
        raise NotImplementedError

    def _beyond_stock(self, update: Update[Content]) -> list[str]:
        """What this sync needs and an engine without the plugin has not."""
        return ["verify=True asks for a route of its own"] if self.verify else []

    def _before_the_first(self, update: Update[Content]) -> None:
        """What must hold before the first sync. A collective."""

    def _steps(self, update: Update[Content]) -> int:
        """How often a send tells of a step."""
        return len(update.buckets)

    def _look(self) -> bool:
        """Whether some engine has no plugin; it then gets none of the fields that it would ignore. A collective."""

        def missing() -> bool:
            for transport in self._called():
                try:
                    transport.ask(STATUS_ROUTE)
                except SyncError as error:
                    if error.answered == 404:
                        return True
                    raise SyncError(f"is the engine well? {error}") from error
            return False

        stock = any(self._ranks.everyone(self._together(missing)))
        if stock and self._ranks.rank == 0:
            logger.warning(STOCK)
        return stock

    def _make_ranks(self, gpus_per_engine: int) -> Ranks:
        return Ranks(len(self._transports), gpus_per_engine)

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

    def _everyones(self, call: Callable[[Transport], Answer]) -> list[Answer]:
        """Call every engine, each from its own rank; all answers, on every rank."""
        mine = self._together(lambda: [call(transport) for transport in self._called()])
        return [answer for answers in self._ranks.everyone(mine) for answer in answers]

    def _ask_to_verify(self, expected: Mapping[str, Mapping[str, Mapping[str, Expectation]]]) -> None:
        """Live or base -> module -> layer -> what it must be."""

        def ask() -> None:
            for transport in self._called():
                for weights, modules in expected.items():
                    if modules:
                        transport.ask(VERIFY_ROUTE, {"modules": modules, "weights": weights})

        self._together(ask)

    def _prepare(self, update_id: str) -> Update[Content]:
        modules: dict[str, Content] = {}
        faults: list[str] = []
        for name, model in self._models.items():
            try:
                modules[name] = self._read(model)
            except RequestError as error:
                faults.extend(f"{name}: {fault}" for fault in error.faults)
                continue
            sent = self._tensors(modules[name])
            if empty := [layer for layer, tensors in sent.items() if not all(map(whole_nbytes, tensors))]:
                told = "a parameter of DeepSpeed's ZeRO-3 is, outside of GatheredParameters"
                faults.append(f"{name}: layers with an empty tensor ({told}): {name_some(empty)}")
        if faults:
            raise RequestError(*faults)
        buckets = [
            (name, layers)
            for name, each in modules.items()
            for layers in plan_buckets(
                {layer: flattened_nbytes(tensors) for layer, tensors in self._tensors(each).items()},
                self.args.update_weight_buffer_size,
            )
        ]
        return Update(self.version + 1, update_id, modules, buckets)

    def _log(self, update: Update[Content]) -> None:
        if self._ranks.rank or update.version > LOGGED_VERSIONS:
            return
        for module, content in update.modules.items():
            layers = self._tensors(content)
            logger.info(
                "%s weight sync v%d [%s]: pushed %d %s, %d layer prefixes in %d buckets (unmapped=0)",
                self.log_name, update.version, module, sum(map(len, layers.values())), self.what, len(layers),
                sum(name == module for name, _ in update.buckets),
            )  # fmt: skip
            logger.info("among them %s", ", ".join(list(layers)[:: max(1, len(layers) // 3)][:3]))
