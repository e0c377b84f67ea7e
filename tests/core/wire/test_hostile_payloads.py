"""Every family of hostile payloads: refused, nothing executed, within bounds of memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support import hostile

HARMLESS = {"memo: an index of 2^31", "frame of 2^60"}  # a plain value, which is then refused as no dict of modules
READER = """
    import json, resource, signal, sys, time
    import torch
    from sgld_lora_merge.errors import RequestError
    from sgld_lora_merge.wire.described import PayloadReader
    from sgld_lora_merge.wire.unpickler import load
    from support import hostile

    def now():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    payloads, outcomes = hostile.payloads(sys.argv[1]), {}
    limit = now() + 256 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for family, data in payloads.items():
        signal.setitimer(signal.ITIMER_PROF, 10)  # seconds of its own; the process dies of it
        try:
            load(data, PayloadReader(int))
            outcomes[family] = "read"
        except RequestError as error:
            outcomes[family] = str(error)
        print(json.dumps([family, outcomes[family]]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Family -> message, of one process with 256 MiB to spare and 10 s of its own time for each."""
    canary = tmp_path_factory.mktemp("hostile") / "canary"
    command = [sys.executable, "-c", textwrap.dedent(READER), str(canary)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert not canary.exists(), "a payload was executed"
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    return told, f"the reader ended with {done.returncode} after {list(told)[-1:]}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("family", hostile.payloads("canary"))
def test_a_hostile_payload_is_refused_within_bounds(outcomes, family):
    told, why = outcomes
    assert family in told, why
    assert told[family] != "read" or family in HARMLESS
    assert "asks for more memory" not in told[family], "refused only because there was no more"
    assert len(told[family]) < 1000


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_honest_payload_of_the_same_kind_is_read(protocol):
    """Or the corpus would show nothing."""
    import torch

    from sgld_lora_merge.wire.bucket import flatten
    from sgld_lora_merge.wire.described import PayloadReader
    from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, named_tensors
    from sgld_lora_merge.wire.unpickler import load

    flat, entries = flatten([("x", torch.arange(3.0))])
    data = hostile.inline({"m": {"flattened_tensor": hostile.Inline(flat), "metadata": entries}}, protocol)
    ((name, tensor),) = named_tensors(load(data, PayloadReader(int)), FLATTENED_BUCKET, ["m"])["m"]
    assert (name, tensor.tolist()) == ("x", [0, 1, 2])
