"""Which code merges: the kernel on a GPU that can run it, else plain torch."""

from __future__ import annotations

import logging

import pytest
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.kernels import reference

GPU = torch.device("cuda", 0)


class Kernel:
    """In place of the Triton module, whose import and compiler this machine has, but no GPU."""

    def __init__(self, error=None):
        self.error, self.compiled = error, []

    def compile_ahead(self, *what):
        if self.error is not None:
            raise self.error
        self.compiled.append(what)


@pytest.fixture
def kernel(monkeypatch):
    def use(kernel):
        kernels._kernel_on.cache_clear()
        monkeypatch.setattr(kernels, "_kernel", lambda: kernel)
        return kernel

    yield use
    kernels._kernel_on.cache_clear()


def test_a_cpu_merges_in_plain_torch(kernel):
    kernel(Kernel(RuntimeError("must not be asked")))
    assert kernels._code_for(torch.device("cpu")) is reference
    kernels.compile_ahead(torch.device("cpu"), Precision.FP32, torch.bfloat16, torch.bfloat16, 16)
    assert kernels.scratch_for([], Precision.FP32) is None
    assert kernels.merge([], Precision.FP32, None) == []


def test_a_gpu_has_the_kernel_compiled_once_before_it_is_used(kernel):
    own = kernel(Kernel())
    assert kernels._code_for(GPU) is own
    assert kernels._code_for(GPU) is own
    kernels.compile_ahead(GPU, Precision.FP16, torch.float16, torch.float32, 64)
    assert own.compiled == [
        (GPU, Precision.FP32, torch.bfloat16, torch.bfloat16, 16),
        (GPU, Precision.FP16, torch.float16, torch.float32, 64),
    ]


def test_a_gpu_on_which_it_does_not_compile_merges_in_plain_torch_and_says_so(kernel, caplog):
    kernel(Kernel(RuntimeError("Failed to find C compiler")))
    with caplog.at_level(logging.WARNING):
        assert kernels._code_for(GPU) is reference
        assert kernels._code_for(GPU) is reference
    (record,) = caplog.records
    assert "Failed to find C compiler" in record.getMessage()


def test_a_full_gpu_is_not_taken_for_one_that_cannot_compile(kernel):
    own = kernel(Kernel(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        kernels._code_for(GPU)
    own.error = None
    assert kernels._code_for(GPU) is own
