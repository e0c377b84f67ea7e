"""Stand-ins for the ten-minute start on a machine without a GPU: a tiny Z-Image, and an adapter that PEFT saved.

python -m support.tiny FOLDER    # writes FOLDER/Z-Image and FOLDER/step-100
"""

from __future__ import annotations

import sys
from pathlib import Path

from support import checkpoints, training


def make(folder: Path) -> None:
    """Write a checkpoint of random weights, and a LoRA of rank 4 and alpha 6 that does not leave them as they are."""
    checkpoint = checkpoints.zimage(folder / "Z-Image")
    training.with_lora(training.transformer(checkpoint), init_lora_weights=False).save_pretrained(folder / "step-100")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
