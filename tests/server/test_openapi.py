"""The live app against its own OpenAPI schema: what fits it, and what does not, gets an answer that it declares."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def declared(zimage_session):
    zimage_session.reset()
    zimage_session.update(zimage_session.adapter(), weight_version="good")
    return schemathesis.openapi.from_url(f"{zimage_session.server.client.base_url}/openapi.json")


schema = schemathesis.pytest.from_fixture("declared")


@schema.include(path_regex="^/(lora_merge/|update_weights_from_tensor$)").parametrize()
@settings(
    max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_every_answer_is_one_that_the_schema_declares(case):
    case.validate_response(case.call(), checks=CHECKS)


def test_the_engine_lives_on_after_all_that(zimage):
    zimage.update(zimage.adapter(seed=2))
    zimage.holds(zimage.expect(zimage.adapter(seed=2)))
    assert zimage.server.image()
