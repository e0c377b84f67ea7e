"""Shards made whole: two ranks over gloo, as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgld_lora_merge.trainer.gather import GatherAhead, whole

WORKER = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from sgld_lora_merge.trainer import gather
from sgld_lora_merge.trainer.gather import GatherAhead, whole
from sgld_lora_merge.trainer.ranks import Ranks
def gathered(buckets):
    ahead = GatherAhead(buckets)
    for _ in buckets:
        ahead.prepare()
        ahead.start()
        yield ahead.take()
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
full = [torch.arange(15.0).view(5, 3) + i for i in range(4)]  # five rows on two ranks: uneven shards
placed = [distribute_tensor(t, mesh, [p]) for t, p in zip(full, (Shard(0), Shard(1), Replicate(), Shard(0)))]
buckets = [[("a", placed[0]), ("b", placed[1])], [("c", placed[2])], [("d", placed[3])]]
got = [tensor for bucket in gathered(buckets) for tensor in bucket.values()]
assert all(type(t) is torch.Tensor and torch.equal(t, f) for t, f in zip(got, full)), got
assert torch.equal(whole(placed[3]), full[3])
# many at once: uneven and empty shards, one and three dimensions, two dtypes, a large one, a plain one, small groups
gather.GROUP_NBYTES = 500
shapes = [(5, 3), (1, 7), (9,), (4, 2, 3), (6, 4), (1,), (30, 40), (8, 8), (3, 3)]
full = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
full = [t.bfloat16() if i % 3 == 2 else t for i, t in enumerate(full)]
placed = [distribute_tensor(t, mesh, [Shard(0)]) for t in full[:-1]] + [full[-1]]
assert len(gather.group_shards(placed[:-1])) == 4, gather.group_shards(placed[:-1])
(got,) = gathered([list(enumerate(placed))])
assert list(got) == list(range(len(full)))
assert all(type(t) is torch.Tensor and t.dtype == f.dtype and torch.equal(t, f) for t, f in zip(got.values(), full))
one = Ranks(2, 1)
assert one.gather(rank) == [0, 1] and one.gather_of_engine(rank) == [rank] and one.engine == rank
both = Ranks(1, 2)
assert both.gather_of_engine(rank) == ([0, 1] if rank == 0 else []) and both.engine == (0 if rank == 0 else None)
alone = Ranks(1, 1)
assert alone.serves == (rank == 0) and alone.gather_of_engine(rank) == ([0] if rank == 0 else [])
dist.destroy_process_group()
"""


def test_two_ranks_make_shards_whole_and_hear_each_other(tmp_path):
    command = [sys.executable, "-W", "error::FutureWarning:torch", "-c", WORKER]
    root = Path(__file__).parents[3]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], cwd=root) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]


def test_plain_tensors_pass():
    tensor = torch.ones(2)
    assert whole(torch.nn.Parameter(tensor)).data_ptr() == tensor.data_ptr()
    ahead = GatherAhead([])
    ahead.prepare()
    ahead.start()  # there is no bucket


def test_a_gather_of_the_callers_own_is_called_one_bucket_ahead_and_no_further():
    seen = []

    def gather(tensor):
        seen.append(int(tensor))
        return tensor * 10

    ahead = GatherAhead(([(i, torch.tensor(i))] for i in range(3)), gather)
    for index in range(3):
        ahead.prepare()
        assert seen == list(range(index))
        ahead.start()
        assert seen == list(range(index + 1))
        assert ahead.take() == {index: torch.tensor(index * 10)}


def test_what_fails_in_a_collective_is_raised_where_the_other_ranks_hear_of_it():
    def gather(_):
        raise MemoryError("no room")

    ahead = GatherAhead([[("a", torch.ones(1))], [("b", torch.ones(1))]], gather)
    ahead.prepare()
    ahead.start()
    with pytest.raises(MemoryError, match="no room"):
        ahead.take()
