"""The header that tells a version."""

from __future__ import annotations

import pytest

from server_patches.versions import ATTRIBUTE, header_value, stamp


class Output:
    pass


@pytest.mark.parametrize(
    ("versions", "value"),
    [
        ({"transformer": "7"}, "7"),
        ({"transformer": "7", "transformer_2": "7"}, "7"),
        ({"transformer_2": "8", "transformer": "7"}, "transformer=7, transformer_2=8"),
        ({"transformer": "step\r\nset-cookie: x"}, "step??set-cookie: x"),
        ({"transformer": "ü"}, "?"),
    ],
)
def test_a_version_is_a_header_and_nothing_more(versions, value):
    assert header_value(versions) == value


def test_the_first_stamp_stays():
    output = Output()
    stamp(output, {"transformer": "1"})
    stamp(output, {"transformer": "2"})
    assert getattr(output, ATTRIBUTE) == {"transformer": "1"}
