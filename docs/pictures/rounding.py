"""The picture of docs/numerics.md: what rounding to the weight's dtype takes of an update, by the update's size.

    python -m docs.pictures.rounding     # writes rounding.png beside it, and prints the numbers; half a minute on a CPU

Every point is one merge by `merge.kernels.reference`: W0 is normal with standard deviation 0.02, A as PEFT's
gaussian initialisation makes it, B normal with the size on the axis, alpha / rank is 2.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels.reference import MergeJob, Term, merge, scratch_for
from sgld_lora_merge.merge.spans import Span

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROWS, COLUMNS, RANK, SCALE = 1024, 1024, 64, 2.0
SIZES = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PICTURE = Path(__file__).with_suffix(".png")


def layer(size: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W0 ``[ROWS, COLUMNS]``, A ``[RANK, COLUMNS]``, B ``[ROWS, RANK]``; A and B are float32, as a trainer has them."""
    generator = torch.Generator().manual_seed(1)
    base = (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).to(dtype)
    a = torch.randn(RANK, COLUMNS, generator=generator) / RANK
    return base, a, torch.randn(ROWS, RANK, generator=generator) * size


def measure(size: float, dtype: torch.dtype, precision: Precision) -> tuple[float, float]:
    """The rounding loss of one merge, and the share of elements that are W0's still."""
    base, a, b = layer(size, dtype)
    term = Term(a, b, SCALE, (Span(0, ROWS),), (Span(0, COLUMNS),))
    job = MergeJob(torch.empty_like(base), base, (term,))
    (stats,) = merge([job], precision, scratch_for([job], precision))
    return stats.rounding_loss, float((job.out == base).double().mean())


def other_than_fused(size: float) -> float:
    """Share of bfloat16 elements in which fp16 mode and one fused addmm, sglang's own "0" mode, differ."""
    base, a, b = layer(size, torch.bfloat16)
    a, b = a.bfloat16(), b.bfloat16()
    eager = base + (b @ a) * SCALE
    return float((eager != torch.addmm(base, b, a, alpha=SCALE)).double().mean())


def main() -> None:
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, dtype), colour in zip(DTYPES.items(), ("tab:red", "tab:orange", "tab:blue"), strict=True):
        for precision, style in ((Precision.FP32, "-"), (Precision.FP16, "--")):
            points = [measure(size, dtype, precision) for size in SIZES]
            losses, same = zip(*points, strict=True)
            left.loglog(SIZES, losses, style, color=colour, marker=".", label=f"{name}, {precision} mode")
            right.semilogx(SIZES, same, style, color=colour, marker=".")
            print(
                name,
                precision,
                *(f"{size:g}: {loss:.2g} {share:.0%}" for size, loss, share in zip(SIZES, losses, same, strict=True)),
                sep="\n  ",
            )
    left.axhline(1, color="gray", linewidth=0.5)
    left.set(title="rounding_loss", xlabel="size of B's elements", ylabel="lost part / update, by norm")
    left.legend(fontsize=8)
    right.set(title="elements that the update did not change", xlabel="size of B's elements", ylabel="share of all")
    plt.savefig(PICTURE, dpi=110)
    print(
        "fp16 mode against a fused addmm:", *(f"{size:g}: {other_than_fused(size):.1%}" for size in SIZES), sep="\n  "
    )


if __name__ == "__main__":
    main()
