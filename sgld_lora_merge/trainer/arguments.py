"""The trainer's flags, the strategy that they choose, and what the engine must know of them."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace

from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.errors import LoraMergeError, summarise
from sgld_lora_merge.settings import PRECISION_VARIABLE
from sgld_lora_merge.trainer.expected import DTYPES
from sgld_lora_merge.trainer.strategies import (
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
)
from sgld_lora_merge.trainer.sync import WeightSync
from sgld_lora_merge.wire.schema import DEFAULT_MODULE

DEFAULT_BUFFER_SIZE = 2 * 2**30
DEFAULT_DTYPE = "bf16"
# flag that a family fills -> the field of its file
_OF_FAMILY = {
    "lora_target_modules": "target_modules",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "diffusion_forward_dtype": "forward_dtype",
    "update_weight_buffer_size": "buffer_size",
}


def add_lora_arguments(parser: ArgumentParser) -> None:
    """Add the flags; those that a model family fills are None until `validate_lora_arguments`."""
    group = parser.add_argument_group("LoRA weight sync")
    add = group.add_argument
    add("--use-lora", action="store_true", help="train PEFT LoRA")
    add("--colocate", action="store_true", help="trainer and engine share GPUs, so that IPC handles can cross")
    add("--lora-ipc-weight-sync", action="store_true", help="push only A and B by IPC handle; the engine merges")
    add("--lora-upload-weight-sync", action="store_true", help="push only A and B as safetensors over HTTP")
    add("--lora-rank", type=int, help="rank of every pair")
    add("--lora-alpha", type=float, help="the scale is alpha / rank")
    add("--lora-target-modules", nargs="+", help="ends of the names of layers that carry LoRA")
    add("--lora-init-weights", default="gaussian", help="PEFT's init_lora_weights")
    add("--update-weight-buffer-size", type=int, help=f"bytes of one bucket (default {DEFAULT_BUFFER_SIZE})")
    add("--update-weight-target-module", default=DEFAULT_MODULE, help="pipeline module that is trained")
    add("--diffusion-forward-dtype", choices=sorted(DTYPES), help=f"of trainer and engine (default {DEFAULT_DTYPE})")
    add("--model-family", choices=sorted(load_families()), help="fills what other flags leave open")


def validate_lora_arguments(args: Namespace, parser: ArgumentParser | None = None) -> Namespace:
    """Fill what the family knows, in place, and check; return the same ``args``.

    Raises:
        LoraMergeError: with all that is wrong; with a parser, that is its error.
    """
    family = load_families().get(args.model_family)
    for flag, name in _OF_FAMILY.items():
        if getattr(args, flag) is None and family is not None:
            setattr(args, flag, getattr(family, name))
    if args.update_weight_buffer_size is None:
        args.update_weight_buffer_size = DEFAULT_BUFFER_SIZE
    if args.diffusion_forward_dtype is None:
        args.diffusion_forward_dtype = DEFAULT_DTYPE
    faults = _faults(args)
    if faults and parser is not None:
        parser.error(summarise(faults))
    if faults:
        raise LoraMergeError(summarise(faults))
    return args


def engine_environment(args: Namespace) -> dict[str, str]:
    """Return what the engine's environment must hold, so that it merges as the trainer computes."""
    return {PRECISION_VARIABLE: "1" if args.diffusion_forward_dtype == "fp32" else "0"}


def engine_config(args: Namespace) -> dict[str, list[str]]:
    """Return what the engine's configuration file (``sglang serve --config``) must hold; sglang has no flag for it.

    sglang puts adapters of its own (``--lora-path``, ``/v1/set_lora``) on no other layers: on those in whose names, the
    engine's, one of these stands. An update is not restricted by it.
    """
    return {"lora_target_modules": list(args.lora_target_modules)} if args.use_lora else {}


def select_weight_sync(args: Namespace) -> type[WeightSync]:
    """Return the strategy that the flags choose."""
    if not args.use_lora:
        return DiffusionUpdateWeightFromTensor
    if args.lora_ipc_weight_sync:
        return DiffusionUpdateWeightFromTensorLoRAIPC
    if args.lora_upload_weight_sync:
        return DiffusionUpdateWeightLoRAUpload
    return DiffusionUpdateWeightFromTensorLoRA


def _faults(args: Namespace) -> list[str]:
    faults: list[str] = []
    if args.lora_ipc_weight_sync:
        missing = [flag for flag, given in (("--use-lora", args.use_lora), ("--colocate", args.colocate)) if not given]
        faults.extend(f"--lora-ipc-weight-sync needs {flag}" for flag in missing)
    if args.lora_upload_weight_sync and not args.use_lora:
        faults.append("--lora-upload-weight-sync needs --use-lora")
    if args.lora_ipc_weight_sync and args.lora_upload_weight_sync:
        faults.append("--lora-ipc-weight-sync and --lora-upload-weight-sync are two ways; choose one")
    if args.use_lora:
        needed = ("lora_rank", "lora_alpha", "lora_target_modules")
        faults.extend(
            f"--use-lora needs --{name.replace('_', '-')}, or a --model-family that has it"
            for name in needed
            if getattr(args, name) is None
        )
    if args.lora_rank is not None and args.lora_rank < 1:
        faults.append(f"--lora-rank is {args.lora_rank}; it is at least 1")
    if args.lora_alpha is not None and not math.isfinite(args.lora_alpha):
        faults.append(f"--lora-alpha is {args.lora_alpha}; a finite number is needed")
    if args.update_weight_buffer_size < 1:
        faults.append(f"--update-weight-buffer-size is {args.update_weight_buffer_size} bytes; it is at least 1")
    return faults
