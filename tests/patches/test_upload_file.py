"""The body of an upload in a private file."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server_patches import upload, upload_file
from sgld_lora_merge.errors import LoraMergeError


async def chunks(*parts):
    for part in parts:
        yield part


def test_a_body_lies_in_a_private_file_as_long_as_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)

    async def receive():
        async with upload.Uploads().received(chunks(b"ab", b"c")) as received:
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
    """By their lock and not by process ids, which are the same in every container."""
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)
    gone = tmp_path / f"sgld_lora_upload_{os.getpid()}_x"
    other = tmp_path / "other"
    link = tmp_path / "sgld_lora_upload_link"
    for path in (gone, other):
        path.touch()
    link.symlink_to(other)

    async def receive():
        async with upload.Uploads().received(chunks(b"abc")) as received:
            upload_file.remove_leftovers()
            assert Path(received.path).read_bytes() == b"abc"

    asyncio.run(receive())
    assert not gone.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, link.name]


def test_the_file_of_a_process_that_was_killed_is_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)
    killed = f"""
import asyncio, os, pathlib, signal
from server_patches import upload, upload_file
upload_file._SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})

async def chunks():
    yield b"abc"
    os.kill(os.getpid(), signal.SIGKILL)

async def receive():
    async with upload.Uploads().received(chunks()):
        pass

asyncio.run(receive())
"""
    root = Path(upload.__file__).parents[1]
    subprocess.run([sys.executable, "-c", killed], cwd=root, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    upload_file.remove_leftovers()
    assert not list(tmp_path.iterdir())


def test_a_full_memory_is_told_and_leaves_no_file(tmp_path, monkeypatch):
    """At the last byte too, which no buffer keeps until the file is closed."""
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def receive():
        async with upload.Uploads().received(chunks(b"abc")):
            pytest.fail("nothing was written")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LoraMergeError, match=r"has no room for the upload, 3 bytes so far: .*No space left"):
        asyncio.run(receive())
    assert not list(tmp_path.iterdir())


def test_what_another_user_or_a_fifo_has_left_does_not_hold_up_a_start(tmp_path, monkeypatch):
    """An open of a FIFO waits for somebody who writes."""
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)
    os.mkfifo(tmp_path / "sgld_lora_upload_fifo")
    (tmp_path / "sgld_lora_upload_folder").mkdir()
    begun = time.monotonic()
    upload_file.remove_leftovers()
    assert time.monotonic() - begun < 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sgld_lora_upload_fifo", "sgld_lora_upload_folder"]
    (tmp_path / "sgld_lora_upload_mine").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    upload_file.remove_leftovers()
    assert (tmp_path / "sgld_lora_upload_mine").exists()


def test_an_engine_that_starts_before_the_file_is_locked_takes_no_live_upload(tmp_path, monkeypatch):
    """The file that it has removed is not used: another one is made, and no descriptor is left open."""
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)
    flock, removed = upload_file.fcntl.flock, []

    def late(descriptor, how):
        if not removed and how == upload_file.fcntl.LOCK_EX:
            removed.append(descriptor)
            upload_file.remove_leftovers()  # of the other engine
            assert not list(tmp_path.iterdir())
        flock(descriptor, how)

    async def receive():
        async with upload.Uploads().received(chunks(b"abc")) as received:
            upload_file.remove_leftovers()
            return Path(received.path).read_bytes()

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(upload_file.fcntl, "flock", late)
    assert asyncio.run(receive()) == b"abc"
    assert removed
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_gone_when_the_answer_is_made_leaves_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)

    async def receive():
        async with upload.Uploads().received(chunks(b"abc")) as received:
            os.unlink(received.path)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(receive())
    assert len(os.listdir("/proc/self/fd")) == before
