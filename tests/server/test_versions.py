"""Which weights made an answer."""

from __future__ import annotations

HEADER = "x-weight-version"


def generate(engine):
    body = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1, "seed": 1, "response_format": "b64_json"}
    answer = engine.server.post("/v1/images/generations", body)
    assert answer.status_code == 200
    return answer.headers.get(HEADER)


def test_a_generation_says_which_version_made_it(zimage):
    assert generate(zimage) is None
    for version in ("1", "2"):
        zimage.update(zimage.adapter(seed=int(version)), weight_version=version)
        assert generate(zimage) == version
    zimage.server.post("/lora_merge/rollback")
    assert generate(zimage) == "1"
    zimage.reset()
    assert generate(zimage) is None


def test_a_staged_update_is_not_the_version_of_anything(zimage):
    zimage.update(zimage.adapter(seed=1), weight_version="live")
    zimage.update(zimage.adapter(seed=2), weight_version="staged", update_id="versions", commit=False)
    assert generate(zimage) == "live"


def test_model_info_knows_the_version(zimage):
    zimage.update(zimage.adapter(), weight_version="7")
    info = zimage.server.client.get("/model_info").json()
    assert (info["weight_version"], info["weight_versions"]) == ("7", {"transformer": "7"})
    assert info["model_type"] == "diffusion"
    zimage.reset()
    assert zimage.server.client.get("/model_info").json()["weight_version"] is None
