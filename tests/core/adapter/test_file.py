"""A safetensors file as an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgld_lora_merge.adapter.file import read_adapter
from sgld_lora_merge.errors import RequestError

TENSORS = {"x.lora_A": torch.randn(2, 3), "x.lora_B": torch.randn(4, 2).bfloat16(), "x.alpha": torch.tensor(4.0)}


def written(tmp_path, **metadata):
    path = tmp_path / "adapter.safetensors"
    save_file(TENSORS, path, metadata)
    return str(path)


def test_tensors_come_as_they_are(tmp_path):
    named, scaling = read_adapter(written(tmp_path))
    assert scaling == {}
    assert {name: tensor.dtype for name, tensor in named} == {name: tensor.dtype for name, tensor in TENSORS.items()}
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in named)


def mapped(path, tensor):
    """Whether a tensor lies in a mapping of that file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return line.endswith(path)
    return False


def test_nothing_is_copied_so_that_a_worker_reads_what_it_takes(tmp_path):
    """And the mapping outlives the file, which is gone after the answer."""
    path = written(tmp_path)
    named, _ = read_adapter(path)
    assert all(mapped(path, tensor) for _, tensor in named)
    Path(path).unlink()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in named)


def test_layer_scaling_comes_from_the_metadata(tmp_path):
    _, scaling = read_adapter(written(tmp_path, layer_scaling='{"x": 4, "y": 0.5}', format="pt"))
    assert scaling == {"x": 4.0, "y": 0.5}


@pytest.mark.parametrize("text", ["{", "[1]", '{"x": "4"}', '{"x": true}', '{"x": null}'])
def test_metadata_that_is_no_scaling_is_refused(tmp_path, text):
    with pytest.raises(RequestError, match="layer_scaling in the file's metadata"):
        read_adapter(written(tmp_path, layer_scaling=text))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02}.", (2**40).to_bytes(8, "little") + b"{}"])
def test_a_body_that_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="not a safetensors file"):
        read_adapter(str(path))


def test_a_file_cut_short_is_refused(tmp_path):
    path = written(tmp_path)
    with open(path, "r+b") as file:
        file.truncate(file.seek(0, 2) - 8)
    with pytest.raises(RequestError, match="not a safetensors file"):
        read_adapter(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"x": 1' + "0" * 400 + "}", "has a number that is too large"),
        ("[" * 100_000, "is not JSON"),
        ('{"\\ud800": 1.0}', "is not JSON"),
    ],
    ids=["too large", "nested", "lone surrogate"],
)
def test_scales_that_cannot_be_read_or_told_are_refused(tmp_path, text, words):
    with pytest.raises(RequestError, match=words):
        read_adapter(written(tmp_path, layer_scaling=text))
