"""The trainer's side: it needs torch and a running engine, not sglang."""

from sgld_lora_merge.trainer.arguments import (
    add_lora_arguments,
    engine_config,
    engine_environment,
    select_weight_sync,
    validate_lora_arguments,
)
from sgld_lora_merge.trainer.names import LayerPair, PeftLoRAKeyMapper, collect_lora_layer_groups
from sgld_lora_merge.trainer.sync import SyncReport
from sgld_lora_merge.trainer.transport import HttpTransport, SyncError, Transport, UploadTransport
from sgld_lora_merge.trainer.updaters import (
    LORA_IPC_WEIGHT_UPDATE_MODE,
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
)

__all__ = [
    "LORA_IPC_WEIGHT_UPDATE_MODE",
    "DiffusionUpdateWeightFromTensor",
    "DiffusionUpdateWeightFromTensorLoRA",
    "DiffusionUpdateWeightFromTensorLoRAIPC",
    "DiffusionUpdateWeightLoRAUpload",
    "HttpTransport",
    "LayerPair",
    "PeftLoRAKeyMapper",
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
