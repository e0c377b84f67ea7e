"""What `doctor` says where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge.cli import doctor

pytestmark = pytest.mark.gpu


def test_another_process_opens_cuda_memory_of_this_one():
    check = doctor.share()
    assert (check.state, "CUDA memory" in check.meaning) == ("ok", True)


def test_the_gpu_and_its_driver_are_named():
    check = doctor.gpu()
    assert check.state == "ok"
    assert torch.cuda.get_device_name() in check.meaning
