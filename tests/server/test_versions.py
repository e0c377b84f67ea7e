"""Which weights made an answer."""

from __future__ import annotations

HEADER = "x-weight-version"


def generation(engine, **fields):
    body = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1, "seed": 1, "response_format": "b64_json"}
    answer = engine.server.post("/v1/images/generations", body | fields)
    assert answer.status_code == 200
    return answer


def generate(engine):
    """The version that the answer tells, in both places."""
    answer = generation(engine)
    assert answer.headers.get(HEADER) == answer.json().get("weight_version")
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


def test_a_kept_image_says_which_version_made_it_also_after_another_one_is_live(zimage):
    zimage.update(zimage.adapter(seed=1), weight_version="1")
    image = generation(zimage, response_format="url").json()
    zimage.update(zimage.adapter(seed=2), weight_version="2")
    content = zimage.server.client.get(image["data"][0]["url"])
    assert (content.status_code, content.headers[HEADER]) == (200, "1")


def test_a_rollout_says_which_version_made_it(zimage):
    """Its answer is a list in msgpack: the header is the only place."""
    zimage.update(zimage.adapter(), weight_version="7")
    body = {"prompt": "a cat", "seed": 1, "width": 64, "height": 64, "num_inference_steps": 1}
    answer = zimage.server.post("/rollout/generate", body)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "7")


def test_model_info_knows_the_version(zimage):
    zimage.update(zimage.adapter(), weight_version="7")
    info = zimage.server.client.get("/model_info").json()
    assert (info["weight_version"], info["weight_versions"]) == ("7", {"transformer": "7"})
    assert info["model_type"] == "diffusion"
    zimage.reset()
    assert zimage.server.client.get("/model_info").json()["weight_version"] is None
