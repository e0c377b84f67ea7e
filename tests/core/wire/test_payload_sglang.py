"""A stock sglang engine reads what our trainer sends, and the other way round."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import decode, named_tensors, pack

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

ROOT = Path(__file__).parents[3]
# Reads our payload with sglang's own code and writes what it read; then packs as a trainer on sglang does, and keeps
# the memory until its standard input ends.
STOCK_PEER = """
    import os, pickle, sys
    import torch

    torch.multiprocessing.set_sharing_strategy("file_system")
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    folder = sys.argv[1]
    content = MultiprocessingSerializer.deserialize(open(f"{folder}/ours").read())
    read = {
        module: FlattenedTensorBucket(
            flattened_tensor=bucket["flattened_tensor"], metadata=bucket["metadata"]
        ).reconstruct_tensors()
        for module, bucket in content.items()
    }
    torch.save({m: [(name, tensor.clone()) for name, tensor in named] for m, named in read.items()}, f"{folder}/read")

    sent = torch.load(f"{folder}/sent")
    buckets = {module: FlattenedTensorBucket(named_tensors=named) for module, named in sent.items()}
    content = {
        module: {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        for module, bucket in buckets.items()
    }
    parameters = {m: [(name, torch.nn.Parameter(tensor)) for name, tensor in named] for m, named in sent.items()}
    payloads = {
        "bucket": MultiprocessingSerializer.serialize(content, output_str=True),
        "list": MultiprocessingSerializer.serialize(sent, output_str=True),
        "parameters": MultiprocessingSerializer.serialize(parameters, output_str=True),
    }
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    payloads["descriptor"] = MultiprocessingSerializer.serialize(
        {module: [(name, tensor.clone()) for name, tensor in named] for module, named in sent.items()}, output_str=True
    )
    for name, payload in payloads.items():
        open(f"{folder}/theirs {name}", "w").write(payload)
    os.rename(f"{folder}/read", f"{folder}/done")
    sys.stdin.read()
"""


def tensors():
    generator = torch.Generator().manual_seed(3)

    def random(rows, columns, dtype):
        return torch.randn(rows, columns, generator=generator).to(dtype)

    return {
        "transformer": [("a", random(3, 1, torch.bfloat16)), ("b", random(2, 5, torch.float32))],
        "transformer_2": [("c", random(4, 4, torch.float16)), ("d", random(1, 7, torch.float32))],
    }


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The folder in which a process with the real sglang has left what it read and what it sends."""
    folder = tmp_path_factory.mktemp("peer")
    payload, bucket = pack(tensors())
    (folder / "ours").write_text(payload)
    torch.save(tensors(), folder / "sent")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        open(folder / "log", "w") as log,  # not a pipe: torch's shared-memory manager would hold it open
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STOCK_PEER), str(folder)],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        while not (folder / "done").exists():
            assert process.poll() is None, (folder / "log").read_text()
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        yield folder
        process.stdin.close()
    del bucket


def assert_same(read, sent):
    assert list(read) == list(sent)
    for module in sent:
        assert [name for name, _ in read[module]] == [name for name, _ in sent[module]]
        for (name, got), (_, tensor) in zip(read[module], sent[module], strict=True):
            assert got.dtype == tensor.dtype, name
            assert torch.equal(got, tensor), name


def test_a_stock_engine_reads_our_payload(peer):
    assert_same(torch.load(peer / "done"), tensors())


@pytest.mark.parametrize(
    ("form", "load_format"), [("bucket", "flattened_bucket"), ("list", None), ("parameters", None)]
)
def test_we_read_the_payload_of_a_stock_trainer(peer, form, load_format):
    """Its buckets are not aligned, and its pickles are of another protocol than ours."""
    reader = PayloadReader(int)

    content = decode((peer / f"theirs {form}").read_text(), reader)

    assert reader.opened
    assert_same(named_tensors(content, load_format, ["transformer", "transformer_2"]), tensors())


def test_a_stock_trainer_that_shares_by_file_descriptor_is_told_what_to_set(peer):
    with pytest.raises(RequestError, match=r'set_sharing_strategy\("file_system"\)'):
        decode((peer / "theirs descriptor").read_text(), PayloadReader(int))
