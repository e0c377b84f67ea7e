"""State that sglang's models compute from weights: the known one follows a write, and a new one is noticed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from server_patches.derived import DERIVED, NOT_DERIVED, forget_derived, multiplies_with_a_copy

# importing a model imports torch's compiler and sglang's quantization, which warn of themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Only CUDA:UserWarning"),
]

FOLDERS = ("models/dits", "models/vaes", "models/encoders", "layers")
# Where weights are made, loaded, or replaced, which happens before any update of ours.
LOADING = ("__init__", "_apply", "create_weights", "load_weights", "post_load_weights", "process_weights_after_loading",
           "weight_loader", "setup_forward")  # fmt: skip
LORA_AND_QUANTIZED = ("layers/lora/", "layers/quantization/")  # sglang's own adapters; weights that are never merged


def kept_attributes(tree: ast.Module) -> Iterator[str]:
    """Attributes of ``self`` that a function which handles weights sets to something computed."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in LOADING:
            continue
        if "weight" not in ast.unparse(function) and "fold" not in ast.unparse(function):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield target.attr


def test_no_model_of_this_sglang_keeps_anything_else_that_it_computes_from_weights():
    """If this fails in a new version: read the code, and put the attribute into one of the tables of derived.py."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    runtime = Path(root) / "multimodal_gen" / "runtime"
    found = {}
    for folder in FOLDERS:
        for file in sorted((runtime / folder).rglob("*.py")):
            place = file.relative_to(runtime).as_posix()
            if not place.startswith(LORA_AND_QUANTIZED):
                found |= dict.fromkeys(kept_attributes(ast.parse(file.read_text())), place)
    unknown = {name: place for name, place in found.items() if name not in DERIVED | NOT_DERIVED}
    assert not unknown


def bare(cls, **attributes):
    """An instance of a model's class without its constructor, with as much as one of its methods needs."""
    instance = cls.__new__(cls)
    nn.Module.__init__(instance)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance


def write(layer, value):
    """A write as ours: under inference mode, in place."""
    with torch.inference_mode():
        layer.weight.data.fill_(value)


def linear():
    return nn.Linear(4, 4).requires_grad_(False)


def test_lingbots_fused_copy_of_q_k_v_follows_a_write():
    from sglang.multimodal_gen.runtime.models.dits.lingbot_world import CausalLingBotWorldTransformerBlock as Block

    block = bare(Block, to_q=linear(), to_k=linear(), to_v=linear(), _fused_qkv_weight=None, _fused_qkv_bias=None)
    assert block.fuse_qkv_projection()
    write(block.to_k, 3.0)
    assert block.fuse_qkv_projection()
    assert not torch.equal(block._fused_qkv_weight[4:8], block.to_k.weight)
    forget_derived(nn.ModuleList([block]))
    assert block.fuse_qkv_projection()
    assert torch.equal(block._fused_qkv_weight[4:8], block.to_k.weight)
    assert multiplies_with_a_copy(block)


def test_sana_wms_camera_projections_follow_a_write():
    from sglang.multimodal_gen.runtime.models.dits import sana_wm_components as sana

    layers = {f"{name}_proj_cam": linear() for name in "qkv"}
    attention = bare(sana.BidirectionalGDNUCPESinglePathLiteLA, **layers, _cam_qkv_params_cache=None)
    with torch.no_grad():
        attention._get_cam_qkv_params()
        write(layers["v_proj_cam"], 3.0)
        forget_derived(attention)
        weights, _ = attention._get_cam_qkv_params()
    assert torch.equal(weights[8:12], layers["v_proj_cam"].weight)


def test_minimax_h3_says_before_a_write_that_its_cache_cannot_follow():
    """validate_weight_update_source is asked in the plan: `EngineModule.objections`."""
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel as Model

    class Cache:
        weight_files = None

    with pytest.raises(ValueError, match="prebuilt AdaLN sidecar"):
        Model.validate_weight_update_source(bare(Model, adaln_cache=Cache()), weights_path=None)
    Model.refresh_weight_derived_caches(bare(Model, adaln_cache=None), weights_path=None)


def test_what_is_not_there_is_left_alone():
    model = nn.Sequential(linear())
    before = dict(vars(model[0]))
    forget_derived(model)
    assert vars(model[0]) == before
