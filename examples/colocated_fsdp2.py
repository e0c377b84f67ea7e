"""A trainer beside its engine: PEFT LoRA under FSDP2 on two ranks, one optimiser step, one sync, every weight verified.

    python -m examples.colocated_fsdp2

A tiny random Z-Image is served by the real engine on a CPU with two workers (tensor parallel), one beside each rank.
The ranks talk over gloo. With ``--engine`` and ``--checkpoint`` an engine is used that runs already.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import diffusers
import peft
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sgld_lora_merge.trainer import (
    HttpTransport,
    add_lora_arguments,
    engine_environment,
    select_weight_sync,
    validate_lora_arguments,
)
from support import checkpoints, server

RANKS = 2
Shard = Callable[[torch.nn.Module, torch.nn.Module], torch.nn.Module]  # PEFT's model and the transformer in it
Gather = Callable[[torch.Tensor], torch.Tensor]
FLAGS = [
    "--use-lora", "--colocate", "--lora-ipc-weight-sync", "--model-family", "zimage", "--lora-rank", "4",
    "--lora-alpha", "6",
]  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="URL of an engine that runs already")
    parser.add_argument("--checkpoint", type=Path, help="what that engine serves")
    parser.add_argument("--gpus-per-engine", type=int, default=RANKS)
    parser.add_argument("--save", type=Path, help="safetensors file for the adapter that was sent")
    add_lora_arguments(parser)
    given = sys.argv[1:] if argv is None else argv
    args = validate_lora_arguments(parser.parse_args([*FLAGS, *given]), parser)
    if (args.engine is None) != (args.checkpoint is None):
        parser.error("--engine and --checkpoint go together")
    return args


def fsdp2(model: torch.nn.Module, base: torch.nn.Module) -> torch.nn.Module:
    """Shard each block by itself, and then what is left."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in base.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(base, mesh=mesh)
    return model


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_model(args: argparse.Namespace, shard: Shard) -> torch.nn.Module:
    """The diffusers transformer with LoRA of the family's target modules, sharded."""
    torch.manual_seed(1)
    base = diffusers.ZImageTransformer2DModel.from_pretrained(
        args.checkpoint / args.update_weight_target_module, torch_dtype=torch.bfloat16
    )
    suffixes = "|".join(name.replace(".", r"\.") for name in args.lora_target_modules)
    config = peft.LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, init_lora_weights=args.lora_init_weights,
        target_modules=rf"layers\..*\.({suffixes})",
    )  # fmt: skip
    return shard(peft.get_peft_model(base, config, autocast_adapter_dtype=False), base)


def step(model: torch.nn.Module) -> float:
    """One optimiser step towards a random target; the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.05)
    latents, caption = torch.randn(16, 1, 8, 8).bfloat16(), torch.randn(8, 32).bfloat16()
    (output,) = model([latents], torch.tensor([0.5]), [caption], return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(output.float(), torch.randn(output.shape))
    loss.backward()
    optimiser.step()
    return float(loss.detach())


def train(rank: int, args: argparse.Namespace, meet: Path, shard: Shard, gather: Gather | None) -> None:
    """Run one rank of the trainer; the ranks meet in a file."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("sgld_lora_merge").setLevel(logging.INFO)
    diffusers.utils.logging.set_verbosity_error()  # the checkpoint's config has two fields for sglang alone
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    model = sharded_model(args, shard)
    sync = select_weight_sync(args)(
        args, model, [HttpTransport(args.engine)], gpus_per_engine=args.gpus_per_engine, verify=True, gather=gather
    )
    loss = step(model)
    report = sync.update_weights()
    make_whole = gather or full_tensor
    whole = {name: make_whole(tensor) for name, tensor in model.state_dict().items() if "lora_" in name}
    if rank == 0:
        if args.save:
            save_file(whole, args.save)
        print(f"loss {loss:.4f}; version {report.version} is live and verified: {report.layers} layers, "
              f"{report.nbytes} bytes in {report.buckets} buckets, {report.seconds['send']:.3f} s")  # fmt: skip
    dist.destroy_process_group()


def launch(args: argparse.Namespace, shard: Shard, gather: Gather | None) -> None:
    """Run both ranks until they have ended.

    Not by torch's spawn: it waits for the end of a pipe that torch's manager of shared memory holds open, and that one
    lives as long as an engine that has read from it.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = args, Path(folder) / "meet", shard, gather
        ranks = [context.Process(target=train, args=(rank, *given)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if failed := [number for number, rank in enumerate(ranks) if rank.exitcode]:
        raise SystemExit(f"ranks {failed} failed")


def main(shard: Shard = fsdp2, gather: Gather | None = None) -> None:
    args = arguments()
    if args.engine:
        launch(args, shard, gather)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.checkpoint = checkpoints.zimage(Path(folder) / "zimage")
        print("starting sglang-diffusion with a tiny Z-Image; takes 20 to 60 s")
        shape = ("--num-gpus", str(args.gpus_per_engine), "--tp-size", str(args.gpus_per_engine))
        env = engine_environment(args)
        with server.running(args.checkpoint, "Z-Image", Path(folder), arguments=shape, env=env) as engine:
            args.engine = str(engine.client.base_url)
            launch(args, shard, gather)


if __name__ == "__main__":
    main()
