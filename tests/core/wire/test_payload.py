"""Payloads: packed on one side, read on the other."""

import base64
import copy
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import (
    FLATTENED_BUCKET,
    cuda_device_index,
    decode,
    encode,
    named_tensors,
    normalised_uuid,
    pack,
    withdraw,
)

ROOT = Path(__file__).parents[3]


def no_gpu(uuid):
    raise RequestError(f"no GPU {uuid}")


def reader():
    return PayloadReader(no_gpu)


def some_tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        ("to_q.lora_A", torch.randn(2, 6, generator=generator).to(dtype)),
        ("to_q.lora_B", torch.randn(4, 2, generator=generator).to(dtype)),
    ]


def read_back(payload, modules=("transformer",), load_format=FLATTENED_BUCKET):
    return named_tensors(decode(payload, reader()), load_format, list(modules))


def assert_same(read, sent):
    assert [name for name, _ in read] == [name for name, _ in sent]
    for (name, got), (_, tensor) in zip(read, sent, strict=True):
        assert got.dtype == tensor.dtype, name
        assert torch.equal(got, tensor), name


def python(script, *arguments, **options):
    """Start a script in a process of its own. Its output goes nowhere: torch's shared-memory manager inherits it."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        **options,
    )


# one process


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(["transformer", "transformer_2", "text_encoder"]),
        st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
                st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
                st.integers(1, 9),
                st.integers(1, 9),
            ),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
    ),
    st.booleans(),
)
def test_what_is_packed_is_read_back(modules, compact):
    sent = {
        module: [(name, torch.randn(rows, columns).to(dtype)) for name, dtype, rows, columns in tensors]
        for module, tensors in modules.items()
    }

    payload, buckets = pack(sent, compact=compact)
    read = read_back(payload, sent)

    assert len(buckets) == len(sent)
    assert list(read) == list(sent)
    for module in sent:
        assert_same(read[module], sent[module])


def test_a_payload_is_plain_base64():
    payload, _bucket = pack({"transformer": some_tensors()})

    assert isinstance(payload, str)
    assert base64.b64decode(payload, validate=True).startswith(b"\x80\x02")


def test_a_payload_names_classes_of_torch_and_sglang_only():
    """A stock engine has to be able to read it."""
    payload, _bucket = pack({"transformer": some_tensors()})

    data = base64.b64decode(payload)
    assert b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n" in data
    assert b"sgld_lora_merge" not in data


def test_a_list_of_named_tensors_is_read_for_each_module():
    sent = {"transformer": some_tensors(seed=1), "transformer_2": some_tensors(torch.bfloat16, seed=2)}

    read = read_back(encode(sent), sent, load_format=None)

    for module in sent:
        assert_same(read[module], sent[module])


def test_a_bare_list_is_read_for_a_single_module():
    read = read_back(encode(some_tensors()), ["transformer_2"], load_format=None)

    assert_same(read["transformer_2"], some_tensors())


def test_parameters_are_sent_as_tensors():
    parameter = torch.nn.Parameter(torch.randn(2, 3))

    ((_, read),) = read_back(encode([("x", parameter)]), load_format=None)["transformer"]

    assert torch.equal(read, parameter.data)
    assert not read.requires_grad


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_of_cpu_tensors_is_read(protocol):
    content = {"transformer": [(name, torch.nn.Parameter(t)) for name, t in some_tensors(torch.bfloat16)]}
    worker = reader()

    payload = base64.b64encode(pickle.dumps(content, protocol=protocol)).decode()
    read = named_tensors(decode(payload, worker), None, ["transformer"])["transformer"]

    assert_same(read, [(name, tensor.detach()) for name, tensor in some_tensors(torch.bfloat16)])
    assert not worker.opened  # no handle was in it


def test_tensors_that_share_a_storage_inline_are_read():
    whole = torch.arange(12.0).view(3, 4)
    sent = [("row", whole[1:2]), ("columns", whole[:, 1:3]), ("turned", whole.t())]

    payload = base64.b64encode(pickle.dumps(sent)).decode()

    assert_same(read_back(payload, load_format=None)["transformer"], sent)


def test_the_reader_records_that_a_handle_was_opened():
    worker = reader()
    payload, _bucket = pack({"transformer": some_tensors()})

    decode(payload, worker)

    assert worker.opened


def test_an_export_that_was_read_is_gone_with_its_bucket():
    """Case I1: the sender's memory stays flat."""

    def exports():
        return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"torch_{os.getpid()}_")]

    before = exports()
    for _ in range(20):
        payload, bucket = pack({"transformer": some_tensors()})
        content = decode(payload, reader())
        assert len(exports()) == len(before) + 1
        del content, bucket

    assert exports() == before


def test_one_cpu_payload_serves_several_workers_one_after_the_other():
    """One payload for all is allowed with CPU tensors; a worker drops what it read when it has its own copies."""
    payload, bucket = pack({"transformer": some_tensors()})
    name = re.search(rb"/(torch_\d+_\d+_\d+)", base64.b64decode(payload))[1].decode()

    for worker in range(4):
        content = decode(payload, PayloadReader(no_gpu, shared=True, releases=worker == 0))
        assert_same(named_tensors(content, FLATTENED_BUCKET, ["transformer"])["transformer"], some_tensors())
        del content

    assert os.path.exists(f"/dev/shm/{name}")
    del bucket
    assert not os.path.exists(f"/dev/shm/{name}")


def test_i7_an_export_that_nobody_opened_is_gone_when_its_sender_takes_it_back():
    def exports():
        return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"torch_{os.getpid()}_")]

    before = exports()
    payload, buffers = pack({"transformer": some_tensors(), "transformer_2": some_tensors()})
    assert len(exports()) == len(before) + 2
    withdraw(payload, buffers)
    del buffers
    assert exports() == before


class CudaExport:
    """Pickles as torch's export of a CUDA tensor does."""

    def __reduce__(self):
        return reductions.rebuild_cuda_tensor, (*"012345", "GPU-x", *"7890", b"counter", 5, b"event", True)


def test_i7_a_cuda_export_that_nobody_opened_gives_its_counter_back(monkeypatch):
    released = []
    monkeypatch.setattr("sgld_lora_merge.wire.payload.cuda_device_index", {"GPU-x": 3}.__getitem__)
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter", lambda *counter, device: released.append((*counter, device))
    )
    withdraw(encode({"transformer": {"flattened_tensor": CudaExport(), "metadata": []}}), [])
    assert released == [(b"counter", 5, torch.device("cuda", 3))]


# two processes

SENDER = """
    import sys, torch
    from sgld_lora_merge import pack

    def packed(seed):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(2, 6, generator=generator), torch.randn(4, 2, generator=generator)
        return pack({"transformer": [("to_q.lora_A", a), ("to_q.lora_B", b)]})

    def say(text):
        with open(sys.argv[1], "w") as file:
            print(text, file=file)

    (first, kept), (second, overwritten) = packed(5), packed(6)
    say(first + " " + second)
    sys.stdin.readline()
    overwritten[0].fill_(255)
    say("overwritten")
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def sender(tmp_path_factory):
    """Another process that packs `some_tensors` of seeds 5 and 6, and overwrites its second bucket when told."""
    path = tmp_path_factory.mktemp("sender") / "said"
    with python(SENDER, path, stdin=subprocess.PIPE, text=True) as process:

        def answer():
            while not path.exists() or not path.read_text().endswith("\n"):
                assert process.poll() is None, "the sender died"
                time.sleep(0.02)
            said = path.read_text()
            path.unlink()
            return said.split()

        def overwrite():
            process.stdin.write("overwrite\n")
            process.stdin.flush()
            assert answer() == ["overwritten"]

        first, second = answer()
        yield first, second, overwrite
        process.stdin.close()


def test_another_process_packs_and_this_one_reads(sender):
    payload, _, _ = sender

    read = read_back(payload)["transformer"]

    assert_same(read, some_tensors(seed=5))


def test_a_sender_that_overwrites_its_buffer_after_the_plan_changes_nothing(sender):
    """Case I5."""
    _, payload, overwrite = sender
    model = torch.nn.ModuleDict({"to_q": torch.nn.Linear(6, 4, bias=False)})
    twin = copy.deepcopy(model)  # gets the same tensors, without a sender
    engine, twin_engine = (
        MergeEngine(lambda m=m: {"transformer": LinearModule(m)}, Precision.FP32) for m in (model, twin)
    )
    read = read_back(payload)["transformer"]
    plan = engine.plan([ModuleUpdate("transformer", pair_up(read).pairs)])

    overwrite()
    engine.commit(plan)

    assert not torch.equal(read[0][1], some_tensors(seed=6)[0][1])  # what was read was the sender's memory indeed
    twin_engine.commit(twin_engine.plan([ModuleUpdate("transformer", pair_up(some_tensors(seed=6)).pairs)]))
    assert torch.equal(model["to_q"].weight, twin["to_q"].weight)


WITHOUT_SGLANG = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "sglang":
                raise ImportError("sglang is blocked in this process")

    sys.meta_path.insert(0, Blocked())
    import torch
    from sgld_lora_merge import pack
    from sgld_lora_merge.wire.payload import decode, named_tensors
    from sgld_lora_merge.wire.described import PayloadReader

    sent = torch.arange(6.0).view(2, 3)
    payload, bucket = pack({"transformer": [("x.lora_A", sent)]})
    content = decode(payload, PayloadReader(int))
    ((name, read),) = named_tensors(content, "flattened_bucket", ["transformer"])["transformer"]
    sys.exit(0 if name == "x.lora_A" and torch.equal(read, sent) and "sglang" not in sys.modules else 3)
"""


def test_neither_side_needs_sglang():
    with python(WITHOUT_SGLANG) as process:
        assert process.wait() == 0


# content of another form


def test_a_module_that_the_payload_lacks_is_named():
    with pytest.raises(RequestError, match="nothing for module 'transformer_2'; it has transformer"):
        named_tensors({"transformer": []}, None, ["transformer", "transformer_2"])
    assert named_tensors({"transformer": []}, None, ["transformer", "vae"], routed=["vae"]) == {"transformer": []}


def test_a_module_that_was_not_announced_is_named():
    with pytest.raises(RequestError, match="target_modules does not name: vae"):
        named_tensors({"transformer": [], "vae": []}, None, ["transformer"])


def test_missing_and_unannounced_modules_are_named_together():
    with pytest.raises(RequestError) as error:
        named_tensors({"a": [], "b": []}, None, ["c", "d"])

    assert len(error.value.faults) == 3


@pytest.mark.parametrize("content", [None, 3, "transformer", torch.ones(2), b""])
def test_a_payload_that_is_no_dict_of_modules_says_what_it_is(content):
    with pytest.raises(RequestError, match=f"the payload is a {type(content).__name__}, not a dict"):
        named_tensors(content, None, ["transformer"])


def test_a_bare_list_is_refused_for_several_modules():
    with pytest.raises(RequestError, match="the payload is a list, not a dict"):
        named_tensors(some_tensors(), None, ["transformer", "transformer_2"])


def test_a_bare_bucket_is_refused():
    """A stock engine reads any dict as a module map."""
    with pytest.raises(RequestError, match="nothing for module 'transformer'"):
        named_tensors({"flattened_tensor": torch.zeros(1), "metadata": []}, FLATTENED_BUCKET, ["transformer"])


@pytest.mark.parametrize("content", [some_tensors(), {"metadata": []}, {"flattened_tensor": torch.zeros(1)}, None])
def test_a_bucket_has_both_of_its_parts(content):
    with pytest.raises(RequestError, match='transformer: load_format "flattened_bucket" needs'):
        named_tensors({"transformer": content}, FLATTENED_BUCKET, ["transformer"])


def test_a_bucket_without_its_load_format_gets_a_hint():
    payload, _bucket = pack({"transformer": some_tensors()})

    with pytest.raises(RequestError, match='did you mean load_format "flattened_bucket"'):
        read_back(payload, load_format=None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "holds a int, not a list"),
        ("abc", "holds a str, not a list"),
        ([torch.ones(2)], r"not \(name, tensor\)"),
        ([("x", torch.ones(2), 1)], r"not \(name, tensor\)"),
        ([(1, torch.ones(2))], r"not \(name, tensor\)"),
        ([("x", 3)], "'x' is a int, not a tensor"),
        ([("x", None)], "'x' is a NoneType, not a tensor"),
    ],
)
def test_a_list_holds_names_and_tensors(content, words):
    with pytest.raises(RequestError, match=f"transformer: .*{words}"):
        named_tensors({"transformer": content}, None, ["transformer"])


def test_faults_of_several_modules_are_all_named():
    content = {"transformer": [("x", 3), ("y", None)], "transformer_2": [("z", 3)]}

    with pytest.raises(RequestError) as error:
        named_tensors(content, None, ["transformer", "transformer_2"])

    for name in "xyz":
        assert any(repr(name) in fault for fault in error.value.faults), name


@pytest.mark.parametrize("payload", ["not base64!", "abc", "gAJ9\n", "gAJ9 Lg==", "ключ", "===="])
def test_malformed_base64_is_refused(payload):
    with pytest.raises(RequestError, match="serialized_named_tensors is not base64"):
        decode(payload, reader())


# GPUs


@pytest.mark.parametrize(
    ("uuid", "plain"),
    [
        ("GPU-5A1E0C3F-0000-1111-2222-333344445555", "5a1e0c3f-0000-1111-2222-333344445555"),
        ("MIG-GPU-5a1e0c3f-0000", "5a1e0c3f-0000"),
        ("MIG-5a1e0c3f-0000", "5a1e0c3f-0000"),
        ("5a1e0c3f-0000", "5a1e0c3f-0000"),
    ],
)
def test_uuids_are_compared_as_torch_prints_them(uuid, plain):
    assert normalised_uuid(uuid) == plain


class FakeGpu:
    def __init__(self, uuid):
        self.uuid = uuid


def see_gpus(monkeypatch, *uuids):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeGpu(uuids[index]))


def test_the_device_is_found_by_uuid_whatever_its_index_at_the_sender(monkeypatch):
    """Case I2."""
    see_gpus(monkeypatch, "aaaa-1111", "bbbb-2222")

    assert cuda_device_index("GPU-BBBB-2222") == 1
    assert cuda_device_index("aaaa-1111") == 0


def test_an_unknown_uuid_is_an_error_that_says_what_is_seen(monkeypatch):
    """Case I2."""
    see_gpus(monkeypatch, "aaaa-1111")

    with pytest.raises(RequestError, match=r"exported from GPU GPU-cccc.*it sees \['aaaa-1111'\]"):
        cuda_device_index("GPU-cccc")


def test_without_a_gpu_no_uuid_is_known(monkeypatch):
    see_gpus(monkeypatch)

    with pytest.raises(RequestError, match="does not see; it sees none"):
        cuda_device_index("GPU-cccc")


def test_a_cuda_export_carries_the_uuid_in_place_of_the_index(monkeypatch):
    """Slot 6 of the arguments; on another machine or under another CUDA_VISIBLE_DEVICES the index means another GPU."""
    see_gpus(monkeypatch, "aaaa-1111", "bbbb-2222")
    rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
    arguments = (torch.Tensor, torch.Size([2]), (1,), 0, torch.storage.TypedStorage, torch.float32, 1, b"handle", 8, 0,
                 False, b"counter", 0, b"event", True)  # fmt: skip
    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", lambda tensor: (rebuild, arguments))
    asked = []

    def unknown(uuid):
        asked.append(uuid)
        raise RequestError("unknown")

    payload = encode([("x", torch.zeros(2))])

    with pytest.raises(RequestError, match="unknown"):
        decode(payload, PayloadReader(unknown))
    assert asked == ["bbbb-2222"]


READS_A_KILLED_SENDER = """
import os, signal, subprocess, sys, time
import psutil, torch
from sgld_lora_merge.wire.payload import decode
from sgld_lora_merge.wire.described import PayloadReader

sends = "import sys, torch; from sgld_lora_merge import pack; sent = pack({'m': [('x', torch.arange(64.0))]})"
sends += "; print(sent[0], flush=True); sys.stdin.read()"
sender = subprocess.Popen([sys.executable, "-c", sends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
payload = sender.stdout.readline().strip()
managers = psutil.Process(sender.pid).children()
assert [manager.name() for manager in managers] == ["torch_shm_manager"]
content = decode(payload, PayloadReader(lambda uuid: 0))
for each in (sender, *managers):
    os.kill(each.pid, signal.SIGKILL)
sender.wait()
deadline = time.monotonic() + 20
while any(manager.is_running() and manager.status() != "zombie" for manager in managers):
    assert time.monotonic() < deadline
    time.sleep(0.05)
flat = content["m"]["flattened_tensor"]
print(flat.view(dtype=torch.float32)[:64].sum().item(), flush=True)
del content, flat
print("still here", flush=True)
"""


def test_a_sender_and_its_manager_that_are_killed_while_a_payload_is_open_do_not_end_its_reader():
    """Torch tells the manager of memory that it frees, and ends the process when nobody listens."""
    words = [sys.executable, "-W", "ignore", "-c", READS_A_KILLED_SENDER]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stdout.split("\n")) == (0, ["2016.0", "still here", ""]), done.stderr
