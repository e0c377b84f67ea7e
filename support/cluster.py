"""A Ray of this machine's own, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import ray

from support.server import COVERAGE_VARIABLES


@contextlib.contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """Workers are as nice as the tests: others share the machine, and engines inherit it. They are not measured."""
    with pytest.MonkeyPatch.context() as patched:
        for variable in COVERAGE_VARIABLES:
            patched.delenv(variable, raising=False)
        patched.setenv("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
