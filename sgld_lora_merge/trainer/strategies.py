"""The strategies: each one is what it sends and how that travels."""

from __future__ import annotations

from sgld_lora_merge.trainer.contents import FullWeights, MergedWeights, Pairs
from sgld_lora_merge.trainer.handles import ByHandles
from sgld_lora_merge.trainer.sync import WeightSync
from sgld_lora_merge.trainer.uploads import ByUpload
from sgld_lora_merge.wire.schema import LORA_MERGE

LORA_IPC_WEIGHT_UPDATE_MODE = LORA_MERGE


class DiffusionUpdateWeightFromTensorLoRAIPC(WeightSync):
    """Send A and B as handles, CUDA IPC or shared memory; the engines, on this machine's GPUs, merge."""

    log_name, contents, travel = "LoRA IPC", Pairs, ByHandles


class DiffusionUpdateWeightLoRAUpload(WeightSync):
    """Send A and B as one safetensors file over HTTP; the engines, anywhere, merge."""

    log_name, contents, travel = "LoRA upload", Pairs, ByUpload


class DiffusionUpdateWeightFromTensor(WeightSync):
    """Send every weight as handles. A sync that fails may have changed a part, and the message says so."""

    log_name, contents, travel = "Full", FullWeights, ByHandles


class DiffusionUpdateWeightFromTensorLoRA(WeightSync):
    """Send every weight with the adapter merged by the trainer, as handles. A failure is as above."""

    log_name, contents, travel = "Merged", MergedWeights, ByHandles
