"""Reinforcement learning in miniature: the real engine draws digits, and learns to draw threes only.

    make demo       (or: python -m examples.tiny_grpo --steps 20 --group 12 --output demo_output)

Every step brings the trainer's LoRA to sglang-diffusion by handle and verifies it. The engine draws a group of images
on its rollout route, which tells the latents and the log-probability of every step of its sampler. An image is worth
the more the surer a classifier is that it reads a three, and one optimiser step makes those images likelier that are
better than their group (GRPO). The trainer computes the log-probabilities again, with PEFT's model: how far the two
are apart is `train/log_prob_mean_abs_diff`. The first ten policies then go to a second engine twice, by handle in the
other precision and merged by the trainer, so that the three ways can be compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import peft
import safetensors.torch
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table
from torch import nn

from examples.digits import Reader, checkpoint, reader, velocity
from sgld_lora_merge.adapter.precision import PRECISION_VARIABLE
from sgld_lora_merge.trainer import HttpTransport, add_lora_arguments, select_weight_sync, validate_lora_arguments
from support import server

WANTED = 3
DENOISING_STEPS, NOISY_STEPS, NOISE_LEVEL = 6, 4, 0.7  # noise in the first four, then straight on
LEARNING_RATE = 1e-2
RECORDED = 10  # steps of which the three ways are compared
LORA = ["--use-lora", "--model-family", "zimage", "--lora-rank", "4", "--lora-alpha", "8"]
IPC, MERGED = [*LORA, "--colocate", "--lora-ipc-weight-sync"], LORA
WAYS = ("LoRA IPC, fp32", "LoRA IPC, fp16", "merged by the trainer")
console = Console()

Policy = dict[str, torch.Tensor]  # A and B of every layer, by PEFT's names


@dataclass(frozen=True)
class Rollout:
    """An image, and how the engine came to it.

    Attributes:
        image: ``[3, 64, 64]`` in 0 to 1.
        latents: before each denoising step and after the last, ``[steps + 1, 4, 8, 8]``.
        sigmas: noise levels, ``[steps + 1]``.
        log_probs: the engine's, of each noisy step, the mean over a latent's elements, ``[noisy steps]``.
        caption: the prompt's embedding, ``[tokens, 32]``.
    """

    image: torch.Tensor
    latents: torch.Tensor
    sigmas: torch.Tensor
    log_probs: torch.Tensor
    caption: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What a version of the weights did.

    Attributes:
        images: of its group, ``[group, 3, 64, 64]``.
        rewards: of the images, ``[group]``.
        difference: mean distance of the trainer's log-probabilities from the engine's.
        seconds: by stage.
    """

    version: int
    images: torch.Tensor
    rewards: torch.Tensor
    difference: float
    seconds: dict[str, float]


def rewards(images: torch.Tensor, reads: Reader) -> torch.Tensor:
    """Log-probability, in nats, that an image is read as the wanted digit: ``[group]`` of ``[group, 3, 64, 64]``."""
    pixels = nn.functional.avg_pool2d(images.mean(dim=1), 8) * 2 - 1
    return reads.log_probs(pixels)[:, WANTED]


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than its group each one is, in standard deviations, ``[group]``."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def log_probs(model: nn.Module, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The trainer's log-probability of each noisy step that the engine took, ``[group, noisy steps]``.

    A step of the flow's stochastic equation is a Gaussian: its mean comes from the predicted velocity, its width from
    the noise level alone.
    """
    sigmas = rollouts[0].sigmas
    sigma, span = (each[:NOISY_STEPS, None, None, None] for each in (sigmas[:-1], sigmas[:-1] - sigmas[1:]))
    latents = torch.stack([rollout.latents[: NOISY_STEPS + 1] for rollout in rollouts])
    before, after = latents[:, :-1], latents[:, 1:]
    captions = [rollout.caption for rollout in rollouts for _ in range(NOISY_STEPS)]
    levels = sigma.flatten().repeat(len(rollouts))
    predicted = velocity(model, before.flatten(0, 1).bfloat16(), levels, captions).float().view_as(before)
    spread = NOISE_LEVEL**2 * sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))  # finite where all is noise
    mean = before * (1 - spread * span / (2 * sigma)) - predicted * span * (1 + spread * (1 - sigma) / (2 * sigma))
    return torch.distributions.Normal(mean, (spread * span).sqrt()).log_prob(after).mean(dim=(2, 3, 4))


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Minus the advantage, weighted by how much likelier the trainer holds a step than the engine that took it."""
    return -((new - old).exp() * advantages[:, None]).mean()


def generate(engine: server.Server, seed: int) -> Rollout:
    """One image on the engine's rollout route."""
    answer = engine.post(
        "/rollout/generate",
        {"prompt": "a digit", "seed": seed, "generator_device": "cpu", "width": 64, "height": 64, "guidance_scale": 0.0,
         "num_inference_steps": DENOISING_STEPS, "rollout_noise_level": NOISE_LEVEL, "rollout_debug_mode": False,
         "rollout_sde_step_indices": list(range(NOISY_STEPS)), "rollout_return_denoising_env": True,
         "rollout_return_dit_trajectory": True, "suppress_logs": True},
    )  # fmt: skip
    answer.raise_for_status()
    (drawn,) = msgspec.msgpack.decode(answer.content)
    conditions, trajectory = drawn["denoising_env"]["pos_cond_kwargs"], drawn["dit_trajectory"]
    length = int(_tensor(conditions["caption_valid_lens"]))  # after it the engine has filled up
    return Rollout(
        _tensor(drawn["generated_output"]).float(),
        _tensor(trajectory["latents"]).squeeze(2),
        _tensor(trajectory["sigmas"]),
        _tensor(drawn["rollout_log_probs"])[:NOISY_STEPS],
        _tensor(conditions["encoder_hidden_states"][0])[:length],
    )


def _tensor(field: dict[str, Any]) -> torch.Tensor:
    """A tensor of the rollout route: a safetensors file of one."""
    (tensor,) = safetensors.torch.load(field["data"]).values()
    return tensor


class Loop:
    """What every step does: sync, rollouts, log-probabilities.

    Args:
        model: PEFT's, of the weights that the engine serves.
        flags: of the trainer's library; they choose the way of the sync.
    """

    def __init__(self, model: nn.Module, engine: server.Server, flags: Sequence[str]) -> None:
        parser = argparse.ArgumentParser()
        add_lora_arguments(parser)
        args = validate_lora_arguments(parser.parse_args(flags), parser)
        self.model = model
        self.engine = engine
        self.sync = select_weight_sync(args)(args, model, HttpTransport(str(engine.client.base_url)), verify=True)
        self.reads = reader()

    def step(self, group: int) -> tuple[Step, torch.Tensor, torch.Tensor]:
        """The present policy's step, and its log-probabilities by the trainer and by the engine."""
        seconds = dict(self.sync.update_weights().seconds)
        with timed(seconds, "rollout"):
            rollouts = [generate(self.engine, self.sync.version * 1000 + index) for index in range(group)]
        new, old = log_probs(self.model, rollouts), torch.stack([rollout.log_probs for rollout in rollouts])
        images = torch.stack([rollout.image for rollout in rollouts])
        difference = float((new - old).detach().abs().mean())
        step = Step(self.sync.version, images, rewards(images, self.reads), difference, seconds)
        console.print(
            f"  version {step.version}: reward {step.rewards.mean():.3f}, log-prob difference {difference:.1e}"
        )
        return step, new, old


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started


def train(loop: Loop, steps: int, group: int) -> tuple[list[Step], list[Policy]]:
    """The steps, and the policy of each."""
    optimiser = torch.optim.Adam([each for each in loop.model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    taken, policies = [], []
    for _ in range(steps):
        policies.append({name: each.clone() for name, each in peft.get_peft_model_state_dict(loop.model).items()})
        step, new, old = loop.step(group)
        optimiser.zero_grad()
        policy_loss(new, old, advantages(step.rewards)).backward()
        optimiser.step()
        taken.append(step)
    return taken, policies


def replay(loop: Loop, policies: Sequence[Policy], group: int) -> list[Step]:
    """The same policies and seeds once more, without training."""
    steps = []
    for policy in policies:
        peft.set_peft_model_state_dict(loop.model, policy)
        with torch.no_grad():
            steps.append(loop.step(group)[0])
    return steps


def trained_model(folder: Path) -> nn.Module:
    """PEFT's LoRA on the transformer of the checkpoint."""
    torch.manual_seed(1)
    diffusers.utils.logging.set_verbosity_error()  # the checkpoint's config has fields for sglang alone
    base = diffusers.ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    layers = r"layers\..*\.(to_q|to_k|to_v|to_out\.0|w1|w2|w3)"
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=layers)
    return peft.get_peft_model(base, config)


@contextmanager
def serving(folder: Path, output: Path, *, fp32: bool) -> Iterator[server.Server]:
    """The real engine of the checkpoint in one of the two precisions."""
    console.print(
        f"starting sglang-diffusion, {'fp32' if fp32 else 'fp16'}; takes 20 to 60 s, log in {output}/engine/server.log"
    )
    # one thread: for so small a model more of them only wait for each other
    with server.running(
        folder, "Z-Image", output, env={PRECISION_VARIABLE: str(int(fp32)), "OMP_NUM_THREADS": "1"}
    ) as it:
        yield it


def table(ways: dict[str, list[Step]]) -> Table:
    """Medians of each way's seconds, and how far trainer and engine were apart."""
    made = Table(title="seconds per sync; train/log_prob_mean_abs_diff", title_justify="left")
    for heading in ("way", "syncs", "send", "verify", "rollout of a group", "log-prob difference"):
        made.add_column(heading, justify="left" if heading == "way" else "right")
    for way, steps in ways.items():
        stages = [statistics.median(step.seconds[stage] for step in steps) for stage in ("send", "verify", "rollout")]
        differences = [step.difference for step in steps]
        span = f"{min(differences):.1e} to {max(differences):.1e}"
        made.add_row(way, str(len(steps)), *(f"{each:.3f}" for each in stages), span)
    return made


def picture(ways: dict[str, list[Step]], file: Path, columns: int = 8) -> None:
    """Images of four versions, the reward by version, and the log-prob difference of each way."""
    trained = next(iter(ways.values()))
    chosen = [trained[round(index * (len(trained) - 1) / 3)] for index in range(4)]
    figure = pyplot.figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    for row, (step, axes) in enumerate(zip(chosen, left.subplots(4, 1), strict=True)):
        strip = torch.cat(list(step.images[:columns]), dim=2).clamp(0, 1)
        axes.imshow(strip.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set(xticks=[], yticks=[], ylabel=f"version {step.version}")
        if row == 0:
            axes.set_title("what the engine draws", fontsize=10)
    above, below = right.subplots(2, 1, sharex=True)
    versions = [step.version for step in trained]
    above.plot(versions, [float(step.rewards.mean()) for step in trained], label="mean of the group")
    above.plot(versions, [float(step.rewards.max()) for step in trained], ":", label="best")
    above.set(ylabel="log-probability of a three")
    above.legend(fontsize=8)
    for way, steps in ways.items():
        compared = steps[:RECORDED]
        below.plot([step.version for step in compared], [step.difference for step in compared], ".-", label=way)
    below.axhspan(1e-5, 5e-5, color="gray", alpha=0.2, label="published for Miles-diffusion")
    below.set(yscale="log", xlabel="weight version", ylabel="log-prob difference")
    below.legend(fontsize=7)
    figure.savefig(file, dpi=100)


def failures(trained: Sequence[Step]) -> list[str]:
    """What must hold, and does not."""
    third = max(1, len(trained) // 3)
    first, last = (torch.cat([step.rewards for step in steps]).mean() for steps in (trained[:third], trained[-third:]))
    return [] if last > first else [f"the reward went from {first:.3f} to {last:.3f}; it should rise"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="rollouts and optimiser steps (default: 20)")
    parser.add_argument("--group", type=int, default=12, help="images of one step (default: 12)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the picture and the logs")
    args = parser.parse_args()
    if args.steps < 1 or args.group < 2:
        parser.error("--steps is at least 1, --group at least 2")
    with tempfile.TemporaryDirectory() as folder:
        model = trained_model(checkpoint(Path(folder)))
        with serving(Path(folder), args.output / "fp32", fp32=True) as first:
            trained, policies = train(Loop(model, first, IPC), args.steps, args.group)
        with serving(Path(folder), args.output / "fp16", fp32=False) as second:
            again = [replay(Loop(model, second, way), policies[:RECORDED], args.group) for way in (IPC, MERGED)]
    ways = dict(zip(WAYS, [trained, *again], strict=True))
    console.print(table(ways))
    picture(ways, args.output / "grpo.png")
    console.print(f"samples, rewards, log-prob differences: {args.output / 'grpo.png'}")
    for failure in (found := failures(trained)):
        console.print(f"[red]{failure}[/red]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
