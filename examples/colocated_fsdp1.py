"""The same under FSDP1, whose shards are no DTensors: what ``gather=`` is for.

    python -m examples.colocated_fsdp1

With a ``device_mesh`` FSDP1 gives DTensors too, and no ``gather`` is needed (docs/sharding.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from examples.colocated_fsdp2 import main


def fsdp1(model: torch.nn.Module, base: torch.nn.Module) -> torch.nn.Module:
    """All of it as one unit. The state dict is one of shards, or FSDP1 would gather the whole model for it."""
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    return sharded


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """One tensor, whole on every rank; all ranks call it with the same tensors in the same order."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    tensor.gather(dst=0, out=whole if dist.get_rank() == 0 else None)
    dist.broadcast(whole, src=0)
    return whole


if __name__ == "__main__":
    main(fsdp1, gather)
