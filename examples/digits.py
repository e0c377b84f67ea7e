"""Train the checkpoint that `examples.tiny_grpo` starts from: a Z-Image that draws handwritten digits.

    pip install scikit-learn && python -m examples.digits     writes digits.safetensors and reader.safetensors beside
                                                              this file, in some minutes on a CPU

The checkpoint in the repository is such a run after 1400 of its 1500 steps.

It is the tiny random Z-Image of `support.checkpoints` but for two parts. The transformer is trained by flow matching on
the 1797 digits of 8 x 8 pixels that scikit-learn ships; captions are noise meanwhile, so every prompt asks for a digit,
any digit. A digit's latent is the digit itself in four channels, and the VAE's decoder enlarges it: weights that do so
are written down, not trained. The reader is a linear classifier of the same digits, kept with some of them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support import checkpoints

WEIGHTS = Path(__file__).parent / "digits.safetensors"
READER = Path(__file__).parent / "reader.safetensors"
SIZE = checkpoints.ZImageSize(channels=4)
KEPT = 50  # digits in the reader's file


@dataclass(frozen=True)
class Reader:
    """A linear classifier of digits, ``weight`` ``[10, 64]`` and ``bias`` ``[10]``, and some that it was trained on.

    Attributes:
        pixels: ``[50, 8, 8]`` in -1 to 1.
        labels: which digit each one is, ``[50]``.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    pixels: torch.Tensor
    labels: torch.Tensor

    def log_probs(self, pixels: torch.Tensor) -> torch.Tensor:
        """In nats, ``[n, 10]`` of ``[n, 8, 8]``."""
        return nn.functional.linear(pixels.flatten(1), self.weight, self.bias).log_softmax(dim=1)


def reader() -> Reader:
    return Reader(**load_file(READER))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels ``[1797, 8, 8]`` in -1 to 1, and which digit each one is."""
    import sklearn.datasets  # in no requirement: transformers loads it wherever it is, seconds in every process

    data = sklearn.datasets.load_digits()
    return torch.from_numpy(data.images).float() / 8 - 1, torch.from_numpy(data.target)


def train_reader(pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `Reader` has."""
    import sklearn.linear_model

    fit = sklearn.linear_model.LogisticRegression(C=0.02, max_iter=300).fit(pixels.flatten(1), labels)
    found = {
        "weight": torch.from_numpy(fit.coef_).float().contiguous(),
        "bias": torch.from_numpy(fit.intercept_).float(),
    }
    return found | {"pixels": pixels[:KEPT].clone(), "labels": labels[:KEPT].clone()}


def latents(pixels: torch.Tensor) -> torch.Tensor:
    """``[n, 4, 8, 8]`` of ``[n, 8, 8]``: the digit in every channel."""
    return pixels[:, None].expand(-1, SIZE.channels, -1, -1)


def checkpoint(folder: Path) -> Path:
    """The tiny Z-Image with the trained transformer, and the decoder that fits it."""
    checkpoints.zimage(folder, size=SIZE)
    shutil.copy(WEIGHTS, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.bfloat16)
    with torch.no_grad():
        set_decoder(vae)
    vae.save_pretrained(folder / "vae")
    return folder


def velocity(model: nn.Module, x: torch.Tensor, sigma: torch.Tensor, captions: list[torch.Tensor]) -> torch.Tensor:
    """Z-Image's prediction of noise - data, ``[n, 4, 8, 8]``, at ``x`` of noise level ``sigma`` ``[n]``."""
    output = model(list(x.unsqueeze(2)), 1 - sigma, captions, return_dict=False)[0]
    return -torch.stack(list(output)).squeeze(2)


def train_transformer(model: nn.Module, data: torch.Tensor, steps: int, batch: int = 32) -> None:
    """Flow matching, with a rate that falls to zero."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        clean = data[torch.randint(len(data), (batch,))]
        noise, sigma = torch.randn_like(clean), torch.rand(batch)
        sigma = 3 * sigma / (1 + 2 * sigma)  # the shift of the scheduler
        mixed = torch.lerp(clean, noise, sigma[:, None, None, None])
        caption = torch.randn(32, 32)
        loss = nn.functional.mse_loss(velocity(model, mixed, sigma, [caption] * batch), noise - clean)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0:
            print(f"transformer {step}: loss {loss.item():.4f}", flush=True)


def set_decoder(vae: nn.Module) -> None:
    """Weights, in place, with which the decoder enlarges `latents` back to the digit: nothing in it needs training.

    Two channels carry x and -x through blocks that add nothing. After the last norm silu(x) - silu(-x) is x again.
    """
    decoder = vae.decoder
    for parameter in decoder.parameters():
        parameter.zero_()
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    decoder.conv_in.weight[:, :, 1, 1] = signs[:, None] / SIZE.channels * vae.config.scaling_factor
    decoder.conv_in.bias.copy_(-vae.config.shift_factor * decoder.conv_in.weight.sum(dim=(1, 2, 3)))
    smooth = torch.tensor([0.25, 0.5, 0.25])
    for block in decoder.up_blocks[:-1]:
        block.upsamplers[0].conv.weight.copy_(torch.eye(8)[:, :, None, None] * smooth[:, None] * smooth)
    decoder.conv_norm_out.weight.fill_(1)
    decoder.conv_out.weight[:, :2, 1, 1] = 0.8 * torch.tensor([1.0, -1.0])  # 0.8: the usual RMS of a digit's pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()  # the checkpoint's config has two fields for sglang alone
    with tempfile.TemporaryDirectory() as folder:
        base = checkpoints.zimage(Path(folder), size=SIZE)
        model = diffusers.ZImageTransformer2DModel.from_pretrained(base / "transformer", torch_dtype=torch.float32)
    pixels, labels = digits()
    save_file(train_reader(pixels, labels), READER)
    train_transformer(model, latents(pixels), args.steps)
    save_file({name: each.bfloat16() for name, each in model.state_dict().items()}, WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    main()
