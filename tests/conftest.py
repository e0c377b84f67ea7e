"""Which tests one worker runs: those that share an engine of the whole session together, the others file by file."""

from __future__ import annotations

import pytest

SESSION_ENGINES = {"zimage_session", "sd3_session"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shared = SESSION_ENGINES & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("session engines" if shared else item.path.name))
