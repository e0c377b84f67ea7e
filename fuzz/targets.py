"""What reads a caller's bytes, as functions of bytes that raise for nothing but a fault of ours: another error than a
refusal, or more time or memory than so many bytes may take.

`tests/core/wire/test_parsing_properties.py` gives them mutations of the same seeds for a few seconds.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import torch
from pydantic_core import from_json
from safetensors.torch import save

from sgld_lora_merge.adapter.file import LAYER_SCALING, read_adapter
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.layout import BucketEntry, layout_text, read_layout
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, named_tensors
from sgld_lora_merge.wire.schema import (
    ResetRequest,
    TransactionRequest,
    UpdateRequest,
    UploadQuery,
    VerifyRequest,
    check_update,
    check_upload,
    parse_fields,
    parse_json,
)
from sgld_lora_merge.wire.unpickler import load
from support import hostile
from support.floods import BODIES, FILES, PICKLES, bounded

PAIR = [("layers.0.q.lora_A", torch.ones(2, 8)), ("layers.0.q.lora_B.default.weight", torch.ones(4, 2))]


@dataclass(frozen=True)
class Target:
    """One reader of bytes.

    Attributes:
        parse: raises nothing, whatever the bytes are.
        seeds: inputs that lead to its different parts.
        reads: the modules whose coverage counts.
    """

    parse: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    reads: tuple[str, ...]

    def read(self, data: bytes) -> None:
        """Parse within the time and the memory that so many bytes may take."""
        with bounded(len(data)):
            self.parse(data)


def no_gpu(uuid: str) -> int:
    raise RequestError(f"no GPU {uuid}")


def unpickler(data: bytes) -> None:
    """A payload after base64, to pairs; its tensors have no more bytes than it, but where it names them again."""
    try:
        content = load(data, PayloadReader(no_gpu))
    except RequestError:
        return
    for load_format in (FLATTENED_BUCKET, None):
        with suppress(RequestError):
            named = named_tensors(content, load_format, ["transformer"])["transformer"]
            assert sum(tensor.nbytes for _, tensor in named) <= 4 * len(data)
            pair_up(named, alpha=1.0)


def layout(data: bytes) -> None:
    """A bucket of up to 64 KiB (two bytes), and what its entries are in JSON text: as a layout, and as metadata.

    As a layout it is paired up twice: the second time its form may be known.
    """
    flat = torch.zeros(struct.unpack("<H", data[:2].ljust(2, b"\0"))[0], dtype=torch.uint8)
    text = data[2:].decode(errors="replace")
    with suppress(RequestError):
        named = unflatten(flat, read_layout(text))
        assert sum(tensor.nbytes for _, tensor in named) <= flat.numel()
        for _ in range(2):
            for pair in pair_up(unflatten(flat, read_layout(text)), alpha=1.0).pairs:
                assert pair.a.shape[0] == pair.b.shape[1] == pair.rank
    with suppress(ValueError, TypeError, RequestError):
        unflatten(flat, [BucketEntry(n, shape, dtype, a, b, 0) for n, dtype, shape, a, b in from_json(text)])


def upload(data: bytes) -> None:
    """The body of an upload, to pairs: as it is, and with its header's length put right, or few get beyond that."""
    end = data.rfind(b"}") + 1
    for body in (data, len(data[8:end]).to_bytes(8, "little") + data[8:]):
        with tempfile.NamedTemporaryFile() as file:
            file.write(body)
            file.flush()
            with suppress(RequestError):
                named, scaling = read_adapter(file.name)
                pair_up(named, layer_scaling=scaling, alpha_required=True)


def request(data: bytes) -> None:
    """A JSON body of every route, and the query of an upload; whatever is refused can be told in JSON."""
    for model in (UpdateRequest, ResetRequest, TransactionRequest, VerifyRequest):
        try:
            fields, ignored = parse_fields(model, parse_json(data))
            json.dumps(ignored, ensure_ascii=False).encode()
            if isinstance(fields, UpdateRequest):
                check_update(fields)
        except LoraMergeError as error:
            json.dumps(str(error), ensure_ascii=False).encode()
    with suppress(LoraMergeError):
        check_upload(parse_fields(UploadQuery, dict(parse_qsl(data.decode(errors="replace"))))[0])


def _payloads() -> list[bytes]:
    inline = {"transformer": [(name, hostile.Inline(tensor)) for name, tensor in PAIR]}
    flat, entries = flatten(PAIR)
    bucket = {"transformer": {"flattened_tensor": hostile.Inline(flat), "metadata": entries}}
    compact = {"transformer": {"flattened_tensor": hostile.Inline(flat), "layout": layout_text(entries)}}
    good = [hostile.inline(content, protocol) for content in (inline, bucket, compact) for protocol in (2, 4, 5)]
    return [*good, *hostile.exports(), *(data for data in hostile.payloads("canary").values() if len(data) < 10_000),
            *(flood(500) for flood in PICKLES.values())]  # fmt: skip


def _layouts() -> list[bytes]:
    flat, entries = flatten(PAIR)
    return [struct.pack("<H", flat.numel()) + layout_text(entries).encode()]


def _files() -> list[bytes]:
    alphas = {"layers.0.q.alpha": torch.tensor(4.0)}
    good = [save(dict(PAIR) | alphas, {LAYER_SCALING: '{"layers.0.q": 2.0}'}), save(dict(PAIR))]
    return [*good, *(flood(500) for flood in FILES.values())]


def _requests() -> list[bytes]:
    update = {
        "serialized_named_tensors": ["AA=="], "payload_gpu_uuids": ["u"], "load_format": "flattened_bucket",
        "target_modules": ["transformer"], "weight_update_mode": "lora_merge", "lora_alpha": 1.5, "lora_rank": 4,
        "weight_version": "7", "update_id": "u", "bucket_index": 0, "num_buckets": 2, "commit": False,
        "layer_scaling": {"transformer": {"q": 2.0}}, "allow_partial": True, "adapter": "style", "other": 1,
    }  # fmt: skip
    verify = {"modules": {"transformer": {"q": {"samples": [[0, 0, 1.0, 1.0]]}, "k": {"sha256": "00"}}}}
    query = "target_module=transformer&lora_alpha=1&lora_rank=4&weight_version=1&update_id=u&adapter=a"
    bodies = (update, verify, {"update_id": "u"}, {"target_modules": ["transformer"], "adapter": "style"})
    return [*(json.dumps(body).encode() for body in bodies), query.encode(), *(flood(500) for flood in BODIES.values())]


CORE = "sgld_lora_merge."
TARGETS = {
    "unpickler": Target(unpickler, _payloads, (CORE + "unpickler", CORE + "payload", CORE + "bucket")),
    "layout": Target(layout, _layouts, (CORE + "bucket",)),
    "upload": Target(upload, _files, (CORE + "adapter_file", CORE + "pairs")),
    "request": Target(request, _requests, (CORE + "protocol",)),
}


def corpus(target: str, folder: Path) -> None:
    """Write the seeds of a target into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[target].seeds()):
        (folder / f"seed{number:03}").write_bytes(seed)
