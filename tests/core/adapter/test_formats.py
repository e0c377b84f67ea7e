"""Adapters as users have them, with the scales that PEFT computes with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sgld_lora_merge.adapter.formats import load_pairs, named_tensors
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.errors import LoraMergeError
from tests.core.adapter import pipeline_file

A, B = torch.randn(2, 6), torch.randn(4, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"to_q": nn.Linear(6, 4), "to_k": nn.Linear(6, 4)})])
        self.conv = nn.Conv2d(3, 5, 3)


def trained(**config):
    import peft

    model = peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["to_q", "to_k", "conv"], **config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model


def written(folder, tensors, metadata=None):
    path = folder / "adapter.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata)
    return path


@pytest.mark.parametrize(
    "config",
    [
        {"r": 2, "lora_alpha": 6},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 2, "lora_alpha": 6, "rank_pattern": {"to_k": 3}, "alpha_pattern": {"to_k": 5, r".*0\.to_q": 7}},
        {"r": 2, "lora_alpha": 6, "alpha_pattern": {"q": 5}},  # the end of a name, but not after a dot
    ],
)
def test_a_folder_of_pefts_has_pefts_scales(tmp_path, config):
    model = trained(**config)
    model.save_pretrained(tmp_path)
    expected = {
        name.removeprefix("base_model.model."): layer.scaling["default"]
        for name, layer in model.named_modules()
        if hasattr(layer, "scaling")
    }
    assert {pair.layer: pair.scale for pair in load_pairs(tmp_path)} == expected


def test_what_is_sent_is_what_the_folder_holds(tmp_path):
    model = trained(r=2, lora_alpha=6)
    model.save_pretrained(tmp_path)
    sent = dict(named_tensors(load_pairs(tmp_path)))
    saved = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): tensor
        for name, tensor in model.named_parameters()
        if "lora_" in name
    }
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    assert not pair_up(sent.items()).faults  # the convolution's have their kernels again


def test_a_file_of_diffusers_says_its_alpha_in_its_metadata(tmp_path):
    import diffusers
    import peft

    model = diffusers.SD3Transformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, caption_projection_dim=16, joint_attention_dim=16,
        pooled_projection_dim=16, sample_size=8, pos_embed_max_size=8, in_channels=4, out_channels=4,
    )  # fmt: skip
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["to_q"]), adapter_name="style")
    model.save_lora_adapter(tmp_path, adapter_name="style")
    (file,) = tmp_path.iterdir()
    (pair,) = load_pairs(file)
    assert (pair.layer, pair.scale) == ("transformer_blocks.0.attn.to_q", 3.0)


def test_a_pipelines_file_has_the_modules_name_in_front(tmp_path):
    config = {"transformer.r": 2, "transformer.lora_alpha": 6}
    tensors = {"transformer.x.lora_A.weight": A, "transformer.x.lora_B.weight": B}
    (pair,) = load_pairs(written(tmp_path, tensors, {"lora_adapter_metadata": json.dumps(config)}))
    assert (pair.layer, pair.scale) == ("x", 3.0)


def scales_of(pairs):
    return {pair.layer: pair.scale for pair in pairs}


@pytest.mark.parametrize(
    "text_encoder",
    [
        {"r": 4, "lora_alpha": 16},
        {"r": 2, "lora_alpha": 16, "use_rslora": True},
        {"r": 4, "lora_alpha": 16, "rank_pattern": {"k_proj": 3}, "alpha_pattern": {r"^encoder.*\.q_proj": 5}},
        {"r": 4, "lora_alpha": 16, "alpha_pattern": {"to_q": 5}},  # a layer of the other component
    ],
)
def test_each_component_of_a_pipelines_file_is_read_with_its_own_config(tmp_path, text_encoder):
    trained = pipeline_file.models(
        transformer={"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 7, "q_proj": 1}}, text_encoder=text_encoder
    )
    expected = {}
    for component, model in trained.items():
        expected |= pipeline_file.scales(model, f"{component}.")
    assert len(expected) == 4
    assert scales_of(load_pairs(pipeline_file.saved(tmp_path, trained))) == expected


@pytest.mark.parametrize(("component", "front"), [("transformer", ""), ("text_encoder", "text_encoder.")])
def test_a_pipelines_file_of_one_component_is_read_with_its_config(tmp_path, component, front):
    trained = pipeline_file.models(**{component: {"r": 4, "lora_alpha": 16, "use_rslora": True}})
    expected = pipeline_file.scales(trained[component], front)
    assert scales_of(load_pairs(pipeline_file.saved(tmp_path, trained))) == expected
    with pytest.raises(LoraMergeError, match="says its alpha itself, 16: leave out --alpha"):
        load_pairs(tmp_path / "pytorch_lora_weights.safetensors", alpha=16)


def test_a_component_without_a_config_is_not_read_with_anothers(tmp_path):
    trained = pipeline_file.models(transformer={"r": 4, "lora_alpha": 8}, text_encoder={"r": 2, "lora_alpha": 16})
    path = pipeline_file.saved(tmp_path, trained, described=["transformer"])
    with pytest.raises(LoraMergeError, match=r"says no alpha for text_encoder[.]\S+k_proj, text_encoder[.]\S+: say it"):
        load_pairs(path)
    found = scales_of(load_pairs(path, alpha=16))
    assert {layer.partition(".")[0]: scale for layer, scale in found.items()} == {"transformer": 2, "text_encoder": 8}


def test_names_without_a_component_are_the_transformers(tmp_path):
    """Unless others of the file have one: then what they are is not known."""
    config = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 6})}
    tensors = {"diffusion_model.x.lora_A.weight": A, "diffusion_model.x.lora_B.weight": B}
    assert scales_of(load_pairs(written(tmp_path, tensors, config))) == {"x": 3.0}
    for other in ("text_encoder_2", "transformer"):
        tensors |= {f"{other}.y.lora_A.weight": A, f"{other}.y.lora_B.weight": B}
        with pytest.raises(LoraMergeError, match=r"says no alpha for .*\bx: say it with --alpha"):
            load_pairs(written(tmp_path, tensors, config))


def test_scales_of_layers_go_before_the_config_of_their_component(tmp_path):
    tensors = {"text_encoder.y.alpha": torch.tensor(1.0)}
    for layer in ("transformer.x", "transformer.z", "text_encoder.x", "text_encoder.y"):
        tensors |= {f"{layer}.lora_A.weight": A, f"{layer}.lora_B.weight": B}
    config = {"transformer.r": 2, "transformer.lora_alpha": 8, "text_encoder.r": 2, "text_encoder.lora_alpha": 16}
    metadata = {"lora_adapter_metadata": json.dumps(config), "layer_scaling": '{"transformer.z": 3.5}'}
    expected = {"transformer.x": 4.0, "transformer.z": 3.5, "text_encoder.x": 8.0, "text_encoder.y": 0.5}
    assert scales_of(load_pairs(written(tmp_path, tensors, metadata))) == expected


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"text_encoder.use_dora": True}, r"safetensors, text_encoder is more than A and B.*use_dora=True"),
        ({"text_encoder.lora_alpha": None}, r"safetensors, text_encoder: lora_alpha None"),
        ({"text_encoder.r": 8}, r"safetensors: text_encoder: 'x' has rank 2, its config says 8"),
    ],
)
def test_what_is_wrong_with_a_component_is_said_with_its_name(tmp_path, field, told):
    tensors = {}
    for layer in ("transformer.x", "text_encoder.x"):
        tensors |= {f"{layer}.lora_A.weight": A, f"{layer}.lora_B.weight": B}
    config = {"transformer.r": 2, "transformer.lora_alpha": 8, "text_encoder.r": 2, "text_encoder.lora_alpha": 16}
    path = written(tmp_path, tensors, {"lora_adapter_metadata": json.dumps(config | field)})
    with pytest.raises(LoraMergeError, match=told):
        load_pairs(path)


def test_kohyas_alphas_are_each_layers_own(tmp_path):
    tensors = {}
    for layer, alpha in (("lora_unet_x_to_q", 1.0), ("lora_unet_x_to_k", 4.0)):
        tensors |= {f"{layer}.lora_down.weight": A, f"{layer}.lora_up.weight": B, f"{layer}.alpha": torch.tensor(alpha)}
    assert {pair.layer: pair.scale for pair in load_pairs(written(tmp_path, tensors))} == {
        "lora_unet_x_to_q": 0.5,
        "lora_unet_x_to_k": 2.0,
    }


def test_alpha_is_for_layers_of_which_the_file_says_none(tmp_path):
    tensors = {f"{layer}.lora_{side}": each for layer in "xy" for side, each in (("A", A), ("B", B))}
    path = written(tmp_path, tensors, {"layer_scaling": '{"y": 5.0}'})
    assert [pair.scale for pair in load_pairs(path, alpha=6)] == [3.0, 5.0]
    with pytest.raises(LoraMergeError, match="says no alpha for x: say it with --alpha NUMBER, or with --alpha rank"):
        load_pairs(path)


def test_alpha_may_be_each_layers_own_rank_where_the_file_says_none(tmp_path):
    """Ranks 4 and 2: no number gives both the scale 1.0."""
    tensors = {"x.lora_A": torch.randn(4, 6), "x.lora_B": torch.randn(4, 4), "y.lora_A": A, "y.lora_B": B}
    tensors |= {"z.lora_A": A, "z.lora_B": B, "z.alpha": torch.tensor(6.0)}
    pairs = load_pairs(written(tmp_path, tensors), alpha="rank")
    assert [(pair.layer, pair.rank, pair.scale) for pair in pairs] == [("x", 4, 1.0), ("y", 2, 1.0), ("z", 2, 3.0)]


def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path):
    path = written(tmp_path, {"x.lora_A": A, "y.lora_B": B, "z.bias": B})
    with pytest.raises(LoraMergeError) as caught:
        load_pairs(path, alpha=1)
    for told in ("'x' has lora_A but no lora_B", "'y' has lora_B but no lora_A", "'z.bias' is a bias"):
        assert f"{path}: {told}" in str(caught.value)


OTHER_KINDS = {
    "LoKr": ["lokr_w1", "lokr_w2_a", "lokr_w2_b"],
    "LoHa": ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"],
    "OFT": ["oft_blocks", "oft_r.default.weight", "oft_R.weight"],
    "VeRA": ["vera_lambda_b", "vera_lambda_d.default"],
    "LoCon with a middle matrix": ["lora_mid.weight"],
    "DoRA": ["dora_scale", "lora_magnitude_vector.default.weight"],
    "AdaLoRA": ["lora_E"],
    "IA3": ["ia3_l", "on_input"],
    "GLoRA": ["a1.weight", "a2.weight", "b1.weight", "b2.weight"],
    "a full difference of a weight or a bias": ["diff", "diff_b", "set_weight", "w_norm", "b_norm"],
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_are_refused_by_what_they_are(tmp_path, kind):
    """In one sentence for all their tensors; that their alphas have no pair is none of its own."""
    names = [f"{layer}.{tail}" for layer in ("lora_unet_x", "y") for tail in OTHER_KINDS[kind]]
    tensors = dict.fromkeys([*names, "lora_unet_x.alpha"], torch.ones(2, 2)) | {"lora_unet_x.alpha": torch.ones(())}
    path = written(tmp_path, tensors | {"z.lora_A": A, "z.lora_B": B})
    with pytest.raises(LoraMergeError) as caught:
        load_pairs(path, alpha=1)
    told, _, advice = (
        str(caught.value).removeprefix(f"{path}: ").partition(f" are {kind}, of which no pair can be made: ")
    )
    assert sorted(told.split(", ")) == sorted(names)
    assert advice == "merge it in the trainer or by the tool that made it, and send full weights"


def test_of_many_tensors_of_another_kind_ten_are_named(tmp_path):
    path = written(tmp_path, {f"x.{number:02}.lokr_w1": B for number in range(12)})
    with pytest.raises(LoraMergeError, match=r"x[.]00[.]lokr_w1, .*, x[.]09[.]lokr_w1 and 2 more are LoKr, of which"):
        load_pairs(path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "adapter_config.json is not JSON"),
        ("[]", "adapter_config.json is not a JSON object"),
        ('{"peft_type": "LOHA", "lora_alpha": 1}', "is LOHA; only LoRA is merged"),
        ('{"use_dora": true, "lora_alpha": 1}', "use_dora=True: DoRA"),
        ('{"init_lora_weights": "pissa_niter_4", "lora_alpha": 1}', "changes the base weights too"),
        ('{"lora_alpha": "6"}', "lora_alpha '6' and alpha_pattern {} are not all numbers"),
    ],
)
def test_a_config_that_cannot_be_merged_is_refused(tmp_path, config, told):
    written(tmp_path, {"x.lora_A": A, "x.lora_B": B}).rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(LoraMergeError, match=told):
        load_pairs(tmp_path)


def test_a_second_alpha_is_refused(tmp_path):
    trained(r=2, lora_alpha=6).save_pretrained(tmp_path)
    with pytest.raises(LoraMergeError, match="says its alpha itself, 6: leave out --alpha"):
        load_pairs(tmp_path, alpha=6)


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "adapter").write_bytes(b"a picture")
    with pytest.raises(LoraMergeError, match=r"adapter: this is not a safetensors file"):
        load_pairs(tmp_path / "adapter")


def test_a_path_without_an_adapter_is_named(tmp_path):
    with pytest.raises(LoraMergeError, match="nothing does not exist"):
        load_pairs(tmp_path / "nothing")
    with pytest.raises(LoraMergeError, match=r"has no adapter_config[.]json"):
        load_pairs(tmp_path)


@pytest.mark.parametrize(
    "field",
    [
        {"alora_invocation_tokens": [1]}, {"layer_replication": [[0, 1]]}, {"use_qalora": True},
        {"use_bdlora": {"a": 1}}, {"arrow_config": {"top_k": 3}}, {"bias": "lora_only"}, {"lora_bias": True},
        {"target_parameters": ["x"]},
        {"use_the_next_idea": True},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_a_folder_whose_config_says_more_than_a_and_b_is_refused_by_field(tmp_path, field):
    trained(r=2, lora_alpha=6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | field))
    with pytest.raises(LoraMergeError, match=rf"more than A and B.*{next(iter(field))}="):
        load_pairs(tmp_path)


def test_a_folder_whose_config_says_another_rank_than_its_tensors_is_refused(tmp_path):
    """With alpha 8 the file means 1.0 by its config, and 2.0 by its tensors."""
    trained(r=4, lora_alpha=8, rank_pattern={"to_k": 3}).save_pretrained(tmp_path)
    assert load_pairs(tmp_path)  # a pattern is no mismatch
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(LoraMergeError, match="has rank 4, its config says 8"):
        load_pairs(tmp_path)
