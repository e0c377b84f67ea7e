"""Caches that sglang's models compute from their weights: every write of the plugin must empty them.

A write under inference mode moves neither a tensor's address nor its version counter, so that caches which are keyed on
them do not notice it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

# Attribute -> what it holds. None makes the owner compute it again from the weights when it is next used.
DERIVED: Mapping[str, str] = {
    "_fused_qkv_weight": "LingBot World: a copy of q, k and v in one weight, made once",
    "_cam_qkv_params_cache": "SANA-WM: the camera projections in one weight, keyed on address and version",
    "_triton_norm_weights_cache": "SANA-WM: norm weights in float32, keyed on address and version",
    "_modulation_cache": "Qwen-Image: modulation of the last time step, computed with img_mod and txt_mod",
}

# Looked at and left alone: attribute -> why. tests/patches/test_derived_state.py fails for one that is in neither.
NOT_DERIVED: Mapping[str, str] = {
    "_autocast_linear_dtype": "a dtype; the weights themselves were cast in place",
    "_blend_weight_cache": "weights of a blend of tiles, not of a layer",
    "_chunk_inputs_cache": "inputs of a request",
    "_free_slots": "MiniMax H3's AdaLN cache, which refresh_weight_derived_caches empties",
    "_fused_qkv_bias": "biases are not merged",
    "_fused_weight": "FLUX.2 VAE's fast path, whose layers `EngineModule` refuses",
    "_generated_masks": "masks of a request",
    "_generated_masks_key": "masks of a request",
    "_pdd_heads": "heads from a file of their own, in place of the layer's",
    "_pdd_device_heads": "heads from a file of their own, in place of the layer's",
    "_plucker_emb_cache": "camera embeddings of a request",
    "_sgl_folded": "Qwen-Image 2.1 VAE's fast path, whose layers `EngineModule` refuses",
    "_sgl_folded_key": "goes with _sgl_folded",
    "_sgl_folded_v": "FLUX.2 VAE's fast path, whose layers `EngineModule` refuses",
    "_sgl_unit_weight": "ones",
    "park_non_layer_weights_between_uses": "a switch",
    "processor": "an object without weights",
    "qkv_fusable": "a switch; q, k and v are views of one buffer, which a write in place keeps",
    "step_precision_controller": "picks the dtype of a step; holds no weight",
}


def forget_derived(module: nn.Module) -> None:
    """Empty every cache of a module's weights, so that it is computed again.

    Every update runs this. The lookup in dictionaries takes a fifth of the time of asking modules for an attribute.
    """
    for part in module.modules():
        for kept in (part.__dict__, part._parameters):
            for name in DERIVED.keys() & kept.keys():
                if kept[name] is not None:
                    setattr(part, name, None)


def multiplies_with_a_copy(owner: nn.Module) -> bool:
    """Return whether a block computes with a fused copy of its layers' weights, and never calls the layers."""
    return hasattr(owner, "_fused_qkv_weight")
