"""Whether two processes can share memory, tried the way an update does it: one packs a tensor, the other opens it.

python -m sgld_lora_merge.cli.sharing < payload     prints what the payload's tensor adds up to
"""

from __future__ import annotations

import subprocess
import sys

import torch

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, cuda_device_index, decode, named_tensors, pack

TIMEOUT_S = 120


def try_it(device: torch.device) -> None:
    """Let a child process open a tensor of this one.

    Raises:
        LoraMergeError: it could not, or has read something else.
    """
    tensor = torch.arange(1000, dtype=torch.float32, device=device)
    payload, buffers = pack({"module": [("tensor", tensor)]})
    child = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(child, input=payload, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoraMergeError(f"no answer within {TIMEOUT_S} s") from error
    finally:
        del buffers
    if done.returncode:
        raise LoraMergeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    if float(done.stdout) != float(tensor.sum()):
        raise LoraMergeError(f"it has read {done.stdout.strip()} instead of {float(tensor.sum())}")


def main() -> None:
    content = decode(sys.stdin.read(), PayloadReader(cuda_device_index))
    ((_, tensor),) = named_tensors(content, FLATTENED_BUCKET, ["module"])["module"]
    print(float(tensor.sum()))


if __name__ == "__main__":
    main()
