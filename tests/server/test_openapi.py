"""The live app against its own OpenAPI schema: what fits it, and what does not, gets an answer that it declares."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OWN = [f"/lora_merge/{name}" for name in ("reset", "rollback", "verify", "commit", "abort", "upload")]
POSTS = ["/update_weights_from_tensor", *OWN]
FITTING, OTHER = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
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
