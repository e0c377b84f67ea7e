"""The live app against its own OpenAPI schema: what fits it, and what does not, gets an answer that it declares."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is in requirements/fuzz.txt")
of_answers = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = pytest.mark.slow

CHECKS = [
    pytest.importorskip("schemathesis.checks").not_a_server_error,
    of_answers.status_code_conformance,
    of_answers.content_type_conformance,
    of_answers.response_schema_conformance,
]
OWN = [f"/lora_merge/{name}" for name in ("reset", "rollback", "verify", "resolve", "commit", "abort", "upload")]
POSTS = ["/update_weights_from_tensor", *OWN]
FITTING, OTHER = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
# any bytes are a file: nothing does not fit an upload
CASES = [(path, mode) for path in POSTS for mode in (FITTING, OTHER) if (path, mode) != ("/lora_merge/upload", OTHER)]
GETS = ["/lora_merge/status", "/lora_merge/metrics"]


@pytest.fixture(scope="module")
def declared(zimage_session):
    zimage_session.reset()
    zimage_session.update(zimage_session.adapter(), weight_version="good")
    return schemathesis.openapi.from_url(f"{zimage_session.server.client.base_url}/openapi.json")


def test_every_route_of_ours_is_declared(declared):
    own = {path for path in declared if path.startswith("/lora_merge/")}
    assert own == {*GETS, *OWN}


@pytest.mark.parametrize(("path", "mode"), CASES, ids=str)
def test_every_answer_is_one_that_the_schema_declares(declared, path, mode):
    @settings(
        max_examples=20, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=declared[path]["POST"].as_strategy(generation_mode=mode))
    def holds(case):
        case.validate_response(case.call(), checks=CHECKS)

    holds()


@pytest.mark.parametrize("path", GETS)
def test_what_is_told_is_what_the_schema_declares(declared, path):
    case = declared[path]["GET"].Case()
    case.validate_response(case.call(), checks=CHECKS)


def test_the_engine_lives_on_after_all_that(zimage):
    zimage.update(zimage.adapter(seed=2))
    zimage.holds(zimage.expect(zimage.adapter(seed=2)))
    assert zimage.server.image()
