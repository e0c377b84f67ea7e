"""W0: copies of the rows that are targets."""

from types import SimpleNamespace

import torch

from sgld_lora_merge.base_store import BaseStore, snapshot

KEY = ("qkv.weight", 1)


def test_a_snapshot_does_not_follow_the_live_rows():
    live = torch.arange(12.0).view(4, 3)
    expected = live[1:3].clone()

    base = snapshot(live[1:3])
    live.fill_(-1)

    assert torch.equal(base, expected)


def test_a_snapshot_is_contiguous_keeps_the_dtype_and_needs_no_grad():
    live = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.bfloat16))

    base = snapshot(live[:, 2:5])

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
