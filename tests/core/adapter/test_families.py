"""Model families: the shipped files, the loader, and routes."""

from __future__ import annotations

import diffusers
import pytest
import torch

from sgld_lora_merge.adapter.families import load_families, route, route_layers, routes_of
from sgld_lora_merge.errors import LoraMergeError, RequestError

ROUTES = {"high_noise.": "transformer", "low_noise.": "transformer_2"}
GOOD = """
model_id: someone/model
trainer_class: Model
engine_class: Model
target_modules: [to_q]
rank: 4
alpha: 8
forward_dtype: bf16
buffer_size: 1024
"""


def files(tmp_path, **content):
    for name, text in content.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_the_shipped_families_are_these():
    families = load_families()
    assert set(families) == {
        *(
            "sd3",
            "sd3_5_medium",
            "sd3_5_large",
            "qwen_image",
            "qwen_image_edit",
            "flux_1",
            "flux_2",
            "wan2_1",
            "wan2_2",
        ),
        *("zimage", "ltx_2", "ltx_2_3", "hunyuan_video", "sana", "minimax_h3", "cosmos3"),
    }
    sizes = {name: (each.rank, each.alpha) for name, each in families.items()}
    assert sizes == {name: (32, 64.0) if name.startswith("sd3") else (64, 128.0) for name in families}
    assert families["wan2_2"].routes == ROUTES


@pytest.mark.parametrize("name", load_families())
def test_every_target_of_a_shipped_family_is_a_linear_layer_of_its_trainer_class(name):
    family = load_families()[name]
    if not hasattr(diffusers, family.trainer_class):
        pytest.skip(f"this diffusers has no {family.trainer_class}")
    with torch.device("meta"):
        model = getattr(diffusers, family.trainer_class)()
    linear = [layer for layer, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in family.target_modules:
        assert any(layer.endswith(f".{target}") for layer in linear), target


def test_a_file_is_named_by_its_stem_and_has_no_routes_unless_it_says_so(tmp_path):
    families = load_families(files(tmp_path, mine=GOOD))
    assert families["mine"].alpha == 8.0
    assert families["mine"].routes == {}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("rank: 0", "wrong.yaml: rank: "),
        ('rank: "4"', "wrong.yaml: rank: "),
        ("alpha: .nan", "wrong.yaml: alpha: "),
        ("forward_dtype: fp8", "wrong.yaml: forward_dtype: "),
        ("target_modules: []", "wrong.yaml: target_modules: "),
        ("lora_rank: 4", "wrong.yaml: lora_rank: "),
        ("routes: {high_noise: transformer}", "a prefix is a name and a dot, not ['high_noise']"),
        ("routes: {.: transformer}", "a prefix is a name and a dot"),
        ("routes: {a.: transformer, a.b.: transformer_2}", "no prefix may start with another one: [('a.b.', 'a.')]"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, wrong, named):
    field = wrong.partition(":")[0]
    kept = "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{field}:"))
    with pytest.raises(LoraMergeError) as caught:
        load_families(files(tmp_path, wrong=f"{kept}\n{wrong}\n"))
    assert named in str(caught.value)
    assert "wrong.yaml" in str(caught.value)


def test_all_that_is_wrong_in_all_files_is_named(tmp_path):
    nameless = GOOD.replace("model_id: someone/model", "modle_id: someone/model").replace(
        "class: Model", "class: Other"
    )
    with pytest.raises(LoraMergeError) as caught:
        load_families(
            files(
                tmp_path,
                a=nameless,
                b="[",
                c="",
                d=f"{GOOD}routes: {{a.: transformer}}",
                e=f"{GOOD}routes: {{a.: transformer_2}}",
            )
        )
    for named in (
        "a.yaml: model_id: Field required",
        "a.yaml: modle_id: ",
        "b.yaml is not YAML: ",
        "c.yaml: the file: ",
        "e.yaml: d.yaml has engine_class Model and other routes",
    ):
        assert named in str(caught.value)


def test_routes_are_found_by_the_engines_class_or_a_base_of_it(tmp_path):
    families = load_families(files(tmp_path, mine=f"{GOOD}routes: {{a.: transformer}}"))
    model = type("Model", (), {})
    assert routes_of(model, families) == {"a.": "transformer"}
    assert routes_of(type("FSDPModel", (model,), {}), families) == {"a.": "transformer"}
    assert routes_of(type(None), families) == {}


def test_families_of_one_class_share_the_routes_that_one_of_them_has(tmp_path):
    families = load_families(files(tmp_path, one=GOOD, two=f"{GOOD}routes: {{a.: transformer}}"))
    assert routes_of(type("Model", (), {}), families) == {"a.": "transformer"}


def test_a_prefix_gives_its_module_and_is_taken_off():
    sent = {"transformer": [("low_noise.x.lora_A", 1), ("x.lora_A", 2)], "text_encoder": [("high_noise.y.lora_A", 3)]}
    assert route(sent, ROUTES) == {
        "transformer_2": [("x.lora_A", 1)],
        "transformer": [("x.lora_A", 2), ("y.lora_A", 3)],
    }


@pytest.mark.parametrize("name", ["base_model.model.low_noise.x", "low_noise.base_model.model.x"])
def test_pefts_prefix_may_stand_on_either_side(name):
    assert route_layers({"transformer": {name: 1}}, ROUTES)["transformer_2"].keys() & {"x", "base_model.model.x"}


def test_without_routes_names_stay_as_they_are():
    sent = {"transformer": [("base_model.model.low_noise.x", 1), ("low_noise", 2)]}
    assert route(sent, {}) == sent


def test_a_name_that_only_starts_like_a_prefix_stays():
    assert route({"transformer": [("low_noise_embedder.x", 1)]}, ROUTES) == {
        "transformer": [("low_noise_embedder.x", 1)]
    }


def test_a_module_that_is_not_allowed_is_named_once_for_each_prefix():
    sent = {"transformer": [("low_noise.x", 1), ("low_noise.y", 2), ("x", 3)]}
    with pytest.raises(RequestError) as caught:
        route(sent, ROUTES, ["transformer"])
    assert caught.value.faults == (
        "'low_noise.x' belongs to module 'transformer_2', as every name with the prefix 'low_noise.' does; the request "
        "names transformer only",
    )


def test_two_values_for_one_layer_are_refused():
    with pytest.raises(RequestError, match="transformer_2 has two entries for layer 'x'"):
        route_layers({"transformer": {"low_noise.x": 1}, "transformer_2": {"x": 2}}, ROUTES)
