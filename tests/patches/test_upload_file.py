"""The body of an upload in a private file."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from server_patches import upload


async def chunks(*parts):
    for part in parts:
        yield part


def test_a_body_lies_in_a_private_file_as_long_as_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_SHARED_MEMORY", tmp_path)

    async def receive():
        async with upload.received(chunks(b"ab", b"c")) as received:
            path = Path(received.path)
            assert path.parent == tmp_path
            assert path.read_bytes() == b"abc"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            return received

    received = asyncio.run(receive())
    assert received.nbytes == 3
    assert received.digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert not Path(received.path).exists()


def test_files_that_a_crash_has_left_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_SHARED_MEMORY", tmp_path)
    gone = tmp_path / "sgld_lora_upload_4194305_x"  # beyond the largest process id
    kept = [tmp_path / f"sgld_lora_upload_{os.getpid()}_x", tmp_path / "sgld_lora_upload_x", tmp_path / "other"]
    for path in (gone, *kept):
        path.touch()
    upload.remove_leftovers()
    assert not gone.exists()
    assert all(path.exists() for path in kept)
