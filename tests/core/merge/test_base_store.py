"""W0: copies of the rows that are targets."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.merge.base_store import (
    BaseStore,
    DeviceMemory,
    StorePolicy,
    device_copy,
    host_copies,
    policy_from,
)
from sgld_lora_merge.settings import settings_from

KEY = ("qkv.weight", 1)


def test_a_copy_does_not_follow_the_live_rows():
    live = torch.arange(12.0).view(4, 3)
    expected = live[1:3].clone()

    base = device_copy(live[1:3])
    live.fill_(-1)

    assert torch.equal(base, expected)


def test_a_copy_is_contiguous_keeps_the_dtype_and_needs_no_grad():
    live = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.bfloat16))

    base = device_copy(live[:, 2:5])

    assert base.is_contiguous()
    assert base.untyped_storage().nbytes() == 6 * 3 * 2
    assert base.dtype is torch.bfloat16
    assert not base.requires_grad


def test_the_store_gives_back_what_it_adopted():
    store, base = BaseStore(), torch.ones(2, 3)

    store.adopt({KEY: base})

    assert KEY in store
    assert ("qkv.weight", 0) not in store
    assert store[KEY] is base


def test_the_store_counts_its_bytes():
    store = BaseStore()
    store.adopt({KEY: torch.ones(2, 3), ("out.weight", 0): torch.ones(4, 5, dtype=torch.float16)})

    assert store.nbytes == 2 * 3 * 4 + 4 * 5 * 2


def test_a_store_on_a_cpu_is_on_the_host():
    store = BaseStore()
    store.adopt({KEY: torch.ones(2, 3)})

    assert store.kind == "host"


def test_a_store_with_cuda_tensors_is_on_the_device():
    store = BaseStore()
    store.adopt({KEY: SimpleNamespace(is_cuda=True)})  # no GPU is needed to tell the word

    assert store.kind == "device"


def test_a_dropped_store_is_empty():
    store = BaseStore()
    store.adopt({KEY: torch.ones(2, 3)})

    store.drop()

    assert KEY not in store
    assert store.nbytes == 0
    assert store.kind is None


GIB = 2**30


def test_auto_keeps_base_weights_on_the_device_while_the_reserve_stays_free():
    kind, why = StorePolicy().decide(10 * GIB, DeviceMemory(total=100 * GIB, free=20 * GIB, peak=0))

    assert kind == "device"
    assert why == (
        "auto: 20.0 GiB are free on the device, 10.0 GiB are for base weights, 10.0 GiB stay in reserve "
        "and 0.0 GiB for a generation"
    )


@pytest.mark.parametrize(
    ("policy", "memory"),
    [
        (StorePolicy(), DeviceMemory(total=100 * GIB, free=20 * GIB - 1, peak=0)),
        (StorePolicy(reserve_bytes=11 * GIB), DeviceMemory(total=100 * GIB, free=20 * GIB, peak=0)),
        (StorePolicy(reserve_bytes=0), DeviceMemory(total=100 * GIB, free=20 * GIB, peak=11 * GIB)),
        (StorePolicy("host"), DeviceMemory(total=100 * GIB, free=90 * GIB, peak=0)),
    ],
    ids=["a tenth of the device", "a named reserve", "what a generation once needed", "as told"],
)
def test_base_weights_go_to_the_host(policy, memory):
    assert policy.decide(10 * GIB, memory)[0] == "host"


def test_a_policy_is_read_from_the_environment():
    assert policy_from(settings_from({})) == StorePolicy()
    environ = {"SGLD_LORA_BASE_STORE": "host", "SGLD_LORA_BASE_RESERVE_MB": "100"}
    assert policy_from(settings_from(environ)) == StorePolicy("host", 100 * 2**20)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SGLD_LORA_BASE_STORE": "disk"}, "SGLD_LORA_BASE_STORE='disk' is not one of auto, device, host"),
        ({"SGLD_LORA_BASE_RESERVE_MB": "-1"}, "SGLD_LORA_BASE_RESERVE_MB='-1' is not a number of MiB"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(environ, message):
    with pytest.raises(LoraMergeError) as raised:
        policy_from(settings_from(environ))
    assert str(raised.value) == message


class Runtime:
    """What is called of CUDA's runtime; this machine has none."""

    def __init__(self, failure=0):
        self.failure, self.registered = failure, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if not self.failure:
            self.registered[address] = nbytes
        return self.failure

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return runtime


def rows():
    return {("x", 0): torch.randn(3, 5), ("y", 0): torch.randn(7, 4, dtype=torch.bfloat16)[:, 1:3]}


def test_copies_on_the_host_are_exact_and_pinned_as_long_as_one_of_them_is_used(runtime):
    live = rows()
    copies = host_copies(live, torch.device("cuda:0"))

    assert all(torch.equal(copies[key], live[key]) and copies[key].is_contiguous() for key in live)
    assert list(runtime.registered.values()) == [512]
    del copies["x", 0]
    gc.collect()
    assert runtime.registered
    copies.clear()
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_the_log_says_so(runtime, caplog):
    runtime.failure = 2
    live = rows()

    copies = host_copies(live, torch.device("cuda:0"))

    assert all(torch.equal(copies[key], live[key]) for key in live)
    assert "cannot be pinned (CUDA error 2)" in caplog.text


def test_nothing_to_copy_takes_no_memory(runtime):
    assert host_copies({}, torch.device("cuda:0")) == {}
    assert not runtime.registered
