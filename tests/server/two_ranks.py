"""One of two FSDP2 ranks: trains one real step, syncs by each of the four strategies, and has every weight checked.

python -m tests.server.two_ranks RANK MEETING_FILE URL CHECKPOINT GPUS_PER_ENGINE
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sgld_lora_merge.trainer import HttpTransport, UploadTransport, select_weight_sync
from support import lora, training
from tests.server.trainers import arguments

IPC = ("--use-lora", "--lora-ipc-weight-sync", "--colocate")
UPLOAD = ("--use-lora", "--lora-upload-weight-sync")
MERGED, FULL = ("--use-lora",), ()
# class -> where its blocks are, ends of the names of the layers that are checked
FAMILIES = {
    "SD3Transformer2DModel": ("transformer_blocks", lora.SD3_SUFFIXES),
    "ZImageTransformer2DModel": ("layers", lora.ZIMAGE_SUFFIXES),
}


def sharded(model: torch.nn.Module, transformer: torch.nn.Module, blocks: str) -> torch.nn.Module:
    """Each block by itself, and what is left; on both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    for block in getattr(transformer, blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)
    return model


def whole(model: torch.nn.Module) -> lora.Weights:
    """What the model has, on every rank."""
    state = {name.removeprefix("base_model.model."): each for name, each in model.state_dict().items()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def trained(model: torch.nn.Module) -> torch.nn.Module:
    training.step(model, training.optimiser_of(model))
    return model


def main(rank: int, meet: str, url: str, checkpoint: Path, gpus_per_engine: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    client = httpx.Client(base_url=url, timeout=120)
    base = training.transformer(checkpoint)
    blocks, suffixes = FAMILIES[type(base).__name__]
    targets = lora.layers(lora.base_weights(checkpoint), suffixes)

    def sync(model: torch.nn.Module, flags: tuple[str, ...], weights: lora.Weights) -> None:
        """One sync, its own verification, and that of the test, which is a computation of its own."""
        size = 4096 if flags in (IPC, UPLOAD) else 200_000  # two or more buckets; one of full weights takes a second
        args = arguments(*flags, "--update-weight-buffer-size", str(size))
        transport = (UploadTransport if flags == UPLOAD else HttpTransport)(url)
        strategy = select_weight_sync(args)(args, model, transport, gpus_per_engine=gpus_per_engine, verify=True)
        report = strategy.update_weights()
        assert report.buckets > 1
        if rank == 0:
            expected = {layer: {"sha256": lora.sha256(weight)} for layer, weight in weights.items()}
            answer = client.post("/lora_merge/verify", json={"modules": {"transformer": expected}}).json()
            assert (answer["success"], answer["checked"]) == (True, len(targets)), answer
            print(f"{strategy.log_name}: {answer['checked']} layers are right", flush=True)
        dist.barrier()

    model = trained(sharded(training.with_lora(base, fp32=False), base, blocks))
    tensors = whole(model)
    adapter = {layer: tuple(tensors[f"{layer}.lora_{side}.default.weight"] for side in "AB") for layer in targets}
    # all but one: what SD3's last block asks of its context goes nowhere
    assert sum(bool(b.any()) for _, b in adapter.values()) >= len(targets) - 1, "nothing was learnt"
    mode = client.get("/lora_merge/status").json()["modules"]["transformer"]["merge_precision"]
    merge = {"fp32": lora.merge_fp32, "fp16": lora.merge_fp16}[mode]
    sync(model, IPC, lora.merged(targets, adapter, 1.5, merge))
    client.post("/lora_merge/reset", json={})
    dist.barrier()
    sync(model, UPLOAD, lora.merged(targets, adapter, 1.5, merge))
    sync(model, MERGED, lora.merged(targets, adapter, 1.5, lora.merge_fp16))
    plain = training.transformer(checkpoint)
    trained(sharded(plain, plain, blocks))
    learnt = lora.layers(whole(plain), suffixes)
    same = [layer for layer, weight in targets.items() if torch.equal(learnt[layer], weight)]
    assert len(same) <= 1, "nothing was learnt"
    sync(plain, FULL, learnt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
