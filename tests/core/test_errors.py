"""How faults are counted, shortened and mapped to an HTTP status."""

import pytest

from sgld_lora_merge.errors import ConflictError, LoraMergeError, RequestError, name_some, summarise


def test_ten_faults_are_all_shown():
    assert summarise([f"fault {i}" for i in range(10)]) == "; ".join(f"fault {i}" for i in range(10))


def test_more_than_ten_faults_are_ten_and_a_count():
    faults = [f"fault {i}" for i in range(13)]

    assert summarise(faults) == "; ".join(faults[:10]) + "; and 3 more"


def test_ten_names_are_all_shown():
    assert name_some(list("abcdefghij")) == "a, b, c, d, e, f, g, h, i, j"


def test_more_than_ten_names_are_ten_and_a_count():
    assert name_some(list("abcdefghijkl")) == "a, b, c, d, e, f, g, h, i, j and 2 more"


def test_request_error_keeps_the_faults_that_its_message_hides():
    faults = [f"fault {i}" for i in range(12)]

    error = RequestError(*faults)

    assert error.faults == tuple(faults)
    assert str(error).endswith("fault 9; and 2 more")


@pytest.mark.parametrize(("error", "status"), [(LoraMergeError, 500), (RequestError, 400), (ConflictError, 409)])
def test_every_error_knows_its_status(error, status):
    assert error.status == status
    assert issubclass(error, LoraMergeError)
