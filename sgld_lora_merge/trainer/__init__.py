"""The trainer's side: it needs torch and a running engine, not sglang. `RayTransport` and `RolloutManager` need Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sgld_lora_merge.trainer.arguments import (
    add_lora_arguments,
    engine_config,
    engine_environment,
    select_weight_sync,
    validate_lora_arguments,
)
from sgld_lora_merge.trainer.names import LayerPair, PeftLoRAKeyMapper, collect_lora_layer_groups
from sgld_lora_merge.trainer.strategies import (
    LORA_IPC_WEIGHT_UPDATE_MODE,
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
)
from sgld_lora_merge.trainer.sync import SyncReport
from sgld_lora_merge.trainer.transport import HttpTransport, SyncError, Transport, UploadTransport

if TYPE_CHECKING:
    from sgld_lora_merge.rollout.manager import RolloutManager
    from sgld_lora_merge.trainer.ray_transport import RayTransport

__all__ = [
    "LORA_IPC_WEIGHT_UPDATE_MODE",
    "DiffusionUpdateWeightFromTensor",
    "DiffusionUpdateWeightFromTensorLoRA",
    "DiffusionUpdateWeightFromTensorLoRAIPC",
    "DiffusionUpdateWeightLoRAUpload",
    "HttpTransport",
    "LayerPair",
    "PeftLoRAKeyMapper",
    "RayTransport",
    "RolloutManager",
    "SyncError",
    "SyncReport",
    "Transport",
    "UploadTransport",
    "add_lora_arguments",
    "collect_lora_layer_groups",
    "engine_config",
    "engine_environment",
    "select_weight_sync",
    "validate_lora_arguments",
]

_ON_RAY = {
    "RayTransport": "sgld_lora_merge.trainer.ray_transport",
    "RolloutManager": "sgld_lora_merge.rollout.manager",
}


def __getattr__(name: str) -> Any:
    """Import what needs Ray when it is asked for.

    Raises:
        ImportError: Ray is not installed.
    """
    if name not in _ON_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_ON_RAY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(f"{name} needs Ray: pip install 'sgld-lora-merge[ray]'", name="ray") from error
