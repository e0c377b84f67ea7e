"""Which sglang this is for, every function of it that is changed, and the check that each change took."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sgld_lora_merge.settings import UNTESTED_VARIABLE, settings_from

SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")
_ROOT = "sglang.multimodal_gen.runtime."


@dataclass(frozen=True)
class Patch:
    """One function of sglang's that a hook changes.

    Attributes:
        target: its dotted name.
        kind: sglang's `HookType`, by name.
        hook: what runs.
        why: what is wrong without it.
        until: when it can be deleted.
    """

    target: str
    kind: str
    hook: Callable[..., Any]
    why: str
    until: str


def patches() -> tuple[Patch, ...]:
    """Every change to sglang. Imports of sglang's runtime happen when the hooks run, not here."""
    from server_patches import hooks

    return (
        Patch(
            _ROOT + "entrypoints.http_server.create_app",
            "AROUND",
            hooks.add_routes,
            "its route for updates from tensors loses messages and fields; the /lora_merge routes are new",
            "sglang's route accepts a handler of a plugin",
        ),
        Patch(
            _ROOT + "managers.scheduler.Scheduler.__init__",
            "AFTER",
            hooks.add_handler,
            "a request of ours needs a handler in every worker",
            "sglang lets a plugin register request handlers",
        ),
        Patch(
            _ROOT
            + "post_training.gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin.update_weights_from_tensor",
            "AROUND",
            hooks.update_in_worker,
            "an update by the scheduler's socket or in process is neither agreed on nor all or nothing",
            "sglang's updater lets a plugin take an update mode",
        ),
        Patch(
            _ROOT + "post_training.weights_updater.WeightsUpdater.update_weights_from_tensor",
            "AROUND",
            hooks.refuse_own_merge,
            "its own merge would be taken for base weights",
            "sglang's updater lets a plugin take an update mode",
        ),
        Patch(
            _ROOT + "post_training.weights_updater._load_weights_into_module",
            "AROUND",
            hooks.base_weights_change,
            "a full load (tensor, disk, rollback) changes the base that merges start from",
            "sglang announces weight loads to plugins",
        ),
        *(
            Patch(
                f"{_ROOT}pipelines_core.lora.pipeline.LoRAPipeline.{method}",
                "AROUND",
                hooks.own_adapters_change,
                "it takes the live weights for the base, and would keep merged ones as such",
                "sglang announces weight loads to plugins",
            )
            for method in ("convert_to_lora_layers", "set_lora", "merge_lora_weights")
        ),
        *(
            Patch(
                f"{_ROOT}pipelines_core.lora.pipeline.LoRAPipeline.{method}",
                "BEFORE",
                hooks.take_out,
                "it says success, and leaves an adapter of ours live",
                "sglang lets plugins take part in its LoRA routes",
            )
            for method in ("unmerge_lora_weights", "deactivate_lora_weights")
        ),
        Patch(
            _ROOT + "pipelines_core.lora.pipeline.LoRAPipeline.get_lora_status",
            "AFTER",
            hooks.tell_adapters,
            "/v1/list_loras does not know adapters of ours",
            "sglang lets plugins take part in its LoRA routes",
        ),
        Patch(
            _ROOT + "managers.memory_managers.memory_occupation_controller.MemoryOccupationController"
            ".release_memory_occupation",
            "AROUND",
            hooks.sleep,
            "it parks the merged weights, beside a base store that keeps its device memory",
            "sglang announces sleep and wake to plugins",
        ),
        Patch(
            _ROOT + "managers.memory_managers.memory_occupation_controller.MemoryOccupationController"
            ".resume_memory_occupation",
            "AROUND",
            hooks.wake,
            "it brings back the weights that were parked, which are the base's",
            "sglang announces sleep and wake to plugins",
        ),
        Patch(
            _ROOT + "managers.gpu_worker.GPUWorker.execute_forward",
            "AFTER",
            hooks.notice_generation,
            "an output does not say which weights it was made with",
            "sglang reports a weight_version",
        ),
        Patch(
            _ROOT + "managers.scheduler.Scheduler.return_result",
            "BEFORE",
            hooks.stamp_returned,
            "outputs that were split from a batch are new objects",
            "sglang reports a weight_version",
        ),
        Patch(
            _ROOT + "scheduler_client.AsyncSchedulerClient.forward",
            "AROUND",
            hooks.notice_answer,
            "the stamp has to reach the HTTP answer, and sglang's own weight routes change what the status must show",
            "sglang announces weight loads to plugins",
        ),
        *(
            Patch(
                _ROOT + f"entrypoints.openai.stores.AsyncDictStore.{name}",
                "AROUND",
                hook,
                "a job's or a file's later requests do not say which weights made it",
                "sglang reports a weight_version",
            )
            for name, hook in (
                ("upsert", hooks.keep_stamp),
                ("update_fields", hooks.keep_stamp),
                ("get", hooks.note_stamp),
            )
        ),
    )


def check_version(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this sglang cannot be served, as a sentence that says what to do; None where it can.

    Raises:
        LoraMergeError: a variable has a value that means nothing.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed: pip install 'sgld-lora-merge[engine]'"
    if settings_from(environ).allow_untested_sglang or found in SUPPORTED:
        return None
    return (
        f"sglang {found} is not supported, {' or '.join(SUPPORTED)} is: install one of those, or set "
        f"{UNTESTED_VARIABLE}=1 to try this one, or exclude the plugin sgld_lora_merge with SGLANG_PLUGINS"
    )


def unapplied(applied: set[str]) -> str | None:
    """Which hooks did not take, as a sentence; None where all did."""
    missing = [patch.target for patch in patches() if patch.target not in applied]
    if not missing:
        return None
    return (
        f"these functions of sglang {version('sglang')} could not be changed: {', '.join(missing)}. Weight updates "
        f"would be sglang's own, with its silent failures. Install sglang {' or '.join(SUPPORTED)}, or exclude the "
        "plugin sgld_lora_merge with SGLANG_PLUGINS"
    )
