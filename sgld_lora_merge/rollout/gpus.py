"""The physical GPUs behind the indices that Ray gives out."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from sgld_lora_merge.errors import LoraMergeError

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def uuids_of(indices: Sequence[str]) -> list[str]:
    """Return the UUIDs of this machine's GPUs, in the order of the indices.

    Raises:
        LoraMergeError: there is no such GPU, or nvidia-smi does not tell.
    """
    if not indices:
        return []
    try:
        listed = subprocess.run(NVIDIA_SMI, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoraMergeError(f"the UUIDs of GPUs {', '.join(indices)} are not known: {error}") from error
    return parse(listed, indices)


def parse(listed: str, indices: Sequence[str]) -> list[str]:
    """
    Raises:
        LoraMergeError: an index is not listed.
    """
    uuids = {index.strip(): uuid.strip() for index, _, uuid in (line.partition(",") for line in listed.splitlines())}
    if missing := [index for index in indices if index not in uuids]:
        raise LoraMergeError(f"nvidia-smi lists no GPU {', '.join(missing)}; it lists {', '.join(uuids) or 'none'}")
    return [uuids[index] for index in indices]


def check_apart(by_engine: Mapping[str, Sequence[str]]) -> None:
    """
    Raises:
        LoraMergeError: two engines are on one GPU; which.
    """
    owners: dict[str, list[str]] = {}
    for engine, uuids in by_engine.items():
        for uuid in uuids:
            owners.setdefault(uuid, []).append(engine)
    if shared := [f"{uuid}: {', '.join(engines)}" for uuid, engines in owners.items() if len(engines) > 1]:
        raise LoraMergeError(f"engines share a GPU: {'; '.join(shared)}")
