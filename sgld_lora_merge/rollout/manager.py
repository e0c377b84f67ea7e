"""Many engines on Ray: placed, started, kept on one version, and brought back when they die."""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.rollout.engine_process import EngineSpec
from sgld_lora_merge.rollout.fleet import EngineFleet, Policy, Router, check_policy
from sgld_lora_merge.rollout.gpus import check_apart
from sgld_lora_merge.rollout.live_adapters import LiveAdapters
from sgld_lora_merge.rollout.ray_engine import ANSWER_S, RayEngine
from sgld_lora_merge.trainer.arguments import engine_config, engine_environment

PLACEMENT_S = 120

logger = logging.getLogger(__name__)


class RolloutManager(EngineFleet):
    """Engines that are one transport: a strategy that uploads takes the manager in place of a list of transports.

    The engines are looked at every few seconds. One that has crashed, does not answer, answers 500, or serves something
    else than the last live version is started again where that helps, and is given the last live adapter before the
    router has it back. An update waits for that.

    Args:
        args: of `validate_lora_arguments`.
        arguments: of ``sglang serve``, without host, ports, ``--num-gpus`` and ``--config``.
        engines: how many.
        folder: for the engines' logs, on their machines.
        gpus_per_engine: 0 for engines on CPUs; below 1 beside a trainer on the same GPU.
        merge_mode: sglang's ``--lora-merge-mode``.
        environment: of the engines, beside `engine_environment`.
        host: what they bind to; "0.0.0.0" where trainer or router are on other machines.
        router, policy: of `EngineFleet`.
        strategy: Ray's, of the placement.
        max_adapter_bytes: of host memory for the last live adapters.
        look_every: seconds between two looks at the engines.
        timeout: seconds for the answer to an update.
        **spec: further fields of `EngineSpec`.

    Raises:
        LoraMergeError: the policy cannot be; there is no place for the engines, they share a GPU, or one did not become
            healthy. All are ended then.
    """

    def __init__(
        self,
        args: Namespace,
        arguments: Sequence[str],
        *,
        engines: int,
        folder: Path,
        gpus_per_engine: float = 1,
        merge_mode: str | None = None,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        router: Router | None = None,
        policy: Policy = "immediate",
        strategy: str = "PACK",
        max_adapter_bytes: int = 4 * 2**30,
        look_every: float = 5.0,
        timeout: float = 600.0,
        **spec: Any,
    ) -> None:
        check_policy(policy, router)
        started = EngineSpec(
            arguments=[*arguments, *(() if merge_mode is None else ("--lora-merge-mode", merge_mode))],
            folder=folder,
            environment={**(environment or {}), **engine_environment(args)},
            config=engine_config(args),
            host=host,
            **spec,
        )
        bundle = {"CPU": 1.0} | ({"GPU": float(gpus_per_engine)} if gpus_per_engine else {})
        self._group = placement_group([bundle] * engines, strategy=strategy)
        if not self._group.wait(PLACEMENT_S):
            remove_placement_group(self._group)
            raise LoraMergeError(f"no place for {engines} engines of {bundle}; Ray has {ray.available_resources()}")
        self.engines = [RayEngine(started, self._group, i, gpus_per_engine, timeout) for i in range(engines)]
        super().__init__(self.engines, LiveAdapters(max_adapter_bytes), router, policy)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(look_every,), daemon=True)
        try:
            self.heal()
            if gpus_per_engine >= 1:
                check_apart({engine.name: engine.gpus for engine in self.engines})
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines and their actors, and give their place back."""
        self._closing.set()
        self.serve_nothing()
        stopped = [engine.stopping() for engine in self.engines]
        ray.wait(stopped, num_returns=len(stopped), timeout=ANSWER_S)
        for engine in self.engines:
            engine.end()
        if self._watcher.is_alive():
            self._watcher.join()
        super().close()
        remove_placement_group(self._group)

    def _watch(self, every: float) -> None:
        while not self._closing.wait(every):
            try:
                self.heal()
            except Exception as error:  # whatever it is, it must not end the watch
                if not self._closing.is_set():
                    logger.error("engines are not well, and are looked at again in %g s: %s", every, error)
