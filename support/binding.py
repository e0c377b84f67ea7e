"""The binding proof: every pair of a family's trainer lands in the engine's class, both at their published size.

    python -m support.binding           prints what was found, as JSON
    python -m support.binding --write   writes docs/families.md

Both models are built on the meta device: the trainer's by diffusers, wrapped by PEFT with the family's targets, the
engine's by sglang, from the configuration that the trainer's has. It runs in a process of its own, since it imports
sglang's runtime.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.multimodal_gen.runtime.loader.rank_local_checkpoint import _mapped_param_name
from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping
from torch import nn

from server_patches.engine_module import EngineModule
from sgld_lora_merge.adapter.families import Family, load_families
from sgld_lora_merge.adapter.names import layer_name
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.merge.targets import CannotLand, Landing, Target
from sgld_lora_merge.trainer.expected import DTYPES

PAGE = Path(__file__).parent.parent / "docs" / "families.md"


PAGE_TEXT = """\
# Model families

Each family is a file of `configs/`, whose fields `configs/wan2_2.yaml` explains. For each one the trainer's class, in
its published size and wrapped by PEFT with the family's target modules, is held against the engine's class, built from
the same configuration, both on the meta device. Proved means: every pair lands in the weight, and in the section of it,
that sglang loads the weight of its layer into; the shapes are the same; and every row of a weight that gets a pair gets
exactly one. LoRA is the size of A and B at the family's rank, full that of all weights, both in the family's dtype.

`python -m support.binding --write` made this page with {versions}, and
`tests/patches/test_binding.py` holds it against them.

| family | model | trainer layers | engine targets | fused | LoRA | full | share |
|---|---|---|---|---|---|---|---|
{proved}

Wan2.2 is one of its two transformers. Not proved, as there is nothing to hold the engine's class against; the counts
are of names that land in it, with no shape to compare:

| family | model | why | layers | engine targets | fused |
|---|---|---|---|---|---|
{others}
"""


@dataclass(frozen=True)
class Published:
    """How a family's classes are built.

    Attributes:
        engine_config: sglang's dataclass of the model, below `sglang.multimodal_gen.configs.models.dits`.
        sizes: arguments of the trainer's class that are not its defaults, as the checkpoint's config.json has them.
        blocks, depth: where there is no such class, the name of its list of blocks and the engine's number of them.
    """

    engine_config: str
    sizes: Mapping[str, Any]
    blocks: str = ""
    depth: int = 0


_SD3 = "stablediffusion3.StableDiffusion3TransformerConfig"
PUBLISHED = {
    "sd3": Published(
        _SD3, {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192}
    ),
    "sd3_5_medium": Published(
        _SD3,
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
    ),
    "sd3_5_large": Published(
        _SD3,
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
    ),
    "qwen_image": Published("qwenimage.QwenImageDitConfig", {}),
    "qwen_image_edit": Published("qwenimage.QwenImageEditPlus_2511_DitConfig", {"zero_cond_t": True}),
    "flux_1": Published("flux.FluxConfig", {"guidance_embeds": True}),
    "flux_2": Published("flux.FluxConfig", {}),
    "wan2_1": Published("wanvideo.WanVideoConfig", {}),
    "wan2_2": Published("wanvideo.WanVideoConfig", {}),  # one of its two transformers
    "zimage": Published("zimage.ZImageDitConfig", {}),
    "ltx_2": Published("ltx_2.LTX2Config", {}),
    "hunyuan_video": Published("hunyuanvideo.HunyuanVideoConfig", {}),
    "sana": Published("sana.SanaConfig", {}),
    "minimax_h3": Published("minimax_h3.MiniMaxH3DiTConfig", {}, "transformer_blocks", 50),
    "cosmos3": Published("cosmos3video.Cosmos3VideoConfig", {}, "layers", 36),
}
UNBUILT = {"ltx_2_3": "diffusers {diffusers} builds this class as LTX-2 has it, without LTX-2.3's AdaLN of the prompt"}


@dataclass(frozen=True)
class Binding:
    """What was found for a family.

    Attributes:
        layers: layers of the trainer that carry LoRA.
        targets: weights of the engine that their pairs land in.
        fused: those of them that are of several sections.
        lora_bytes, full_bytes: of the adapter, and of all weights of the trainer's model, in the family's dtype.
        faults: a sentence for each pair that does not land where sglang loads its layer's weight, and for each weight
            that has rows without a pair, or with two.
        unproved: why it is no proof, or only of names in the engine; empty where it is one.
    """

    layers: int = 0
    targets: int = 0
    fused: int = 0
    lora_bytes: int = 0
    full_bytes: int = 0
    faults: tuple[str, ...] = ()
    unproved: str = ""


def obstacle(name: str, family: Family) -> str:
    """Why a family cannot be proved with what is installed; empty where it can."""
    import diffusers
    from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

    if family.engine_class not in ModelRegistry.get_supported_archs():
        return f"sglang {version('sglang')} has no {family.engine_class}"
    if not hasattr(diffusers, family.trainer_class):
        return f"diffusers {diffusers.__version__} has no {family.trainer_class}"
    return UNBUILT.get(name, "").format(diffusers=diffusers.__version__)


def trainer_model(family: Family, sizes: Mapping[str, Any]) -> Any:
    """The trainer's class on the meta device, under PEFT."""
    import diffusers
    import peft

    with torch.device("meta"):
        model = getattr(diffusers, family.trainer_class)(**sizes)
        config = peft.LoraConfig(r=family.rank, lora_alpha=family.alpha, target_modules=family.target_modules)
        return peft.get_peft_model(model, config, low_cpu_mem_usage=True)


def engine_model(family: Family, config: str, checkpoint: Mapping[str, Any]) -> nn.Module:
    """The engine's class on the meta device, as sglang's loader builds it.

    Args:
        config: as in `Published`.
        checkpoint: the content of the checkpoint's config.json.
    """
    from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

    place, _, name = config.rpartition(".")
    dit = getattr(import_module(f"sglang.multimodal_gen.configs.models.dits.{place}"), name)()
    dit.update_model_arch({**checkpoint, "_class_name": family.trainer_class})
    built, _ = ModelRegistry.resolve_model_cls(family.engine_class)
    with torch.device("meta"):
        return built(config=dit, hf_config=dict(checkpoint))


def bind(name: str, family: Family) -> Binding:
    """Build both models of a family, and let every pair land."""
    if reason := obstacle(name, family):
        found = engine_half(family, PUBLISHED[name]) if name in PUBLISHED else Binding()
        return replace(found, unproved=reason)
    published = PUBLISHED[name]
    trainer = trainer_model(family, published.sizes)
    checkpoint = {key: value for key, value in dict(trainer.base_model.model.config).items() if key[0] != "_"}
    return compare(trainer, engine_model(family, published.engine_config, checkpoint), DTYPES[family.forward_dtype])


def engine_half(family: Family, published: Published) -> Binding:
    """Only whether layers of these names land; their shapes are the trainer's to say."""
    engine = engine_model(family, published.engine_config, published.sizes)
    names = [f"{published.blocks}.{i}.{target}" for i in range(published.depth) for target in family.target_modules]
    landings, faults = land(EngineModule(engine, replica_size=1), names)
    hit, uncovered = cover(engine, landings)
    return Binding(
        len(names), len(hit), sum(len(targets) > 1 for targets in hit.values()), faults=(*faults, *uncovered)
    )


def compare(trainer: nn.Module, engine: Any, dtype: torch.dtype) -> Binding:
    """Where the pairs of the one land in the other."""
    weights = set(engine.state_dict())
    table = get_param_names_mapping(engine.param_names_mapping, valid_target_names=weights)
    lora = {name: tensor for name, tensor in trainer.named_parameters() if ".lora_" in name}
    wrapped = {name.partition(".lora_A.")[0] for name in lora if ".lora_A." in name}
    shapes = {layer_name(name): tuple(trainer.get_submodule(name).base_layer.weight.shape) for name in wrapped}
    landings, faults = land(EngineModule(engine, replica_size=1), shapes)
    for layer, landing in landings.items():
        weight, section, _ = _mapped_param_name(f"{layer}.weight", table, weights)  # what sglang's loader does
        if {target.weight for target in landing.targets} != {weight}:
            faults.append(f"{layer!r} lands in {landing.targets[0].weight!r}, its weight is loaded into {weight!r}")
        if section is not None and [target.section for target in landing.targets] != [section]:
            faults.append(f"{layer!r} lands in another section than {section}, where its weight is loaded")
        if landing.shape != shapes[layer]:
            faults.append(f"{layer!r} is {shapes[layer]} in the trainer, {landing.shape} in the engine")
    hit, uncovered = cover(engine, landings)
    of_adapter = sum(tensor.numel() for tensor in lora.values())
    of_all = sum(tensor.numel() for tensor in trainer.parameters())
    return Binding(
        layers=len(shapes),
        targets=len(hit),
        fused=sum(len(targets) > 1 for targets in hit.values()),
        lora_bytes=of_adapter * dtype.itemsize,
        full_bytes=(of_all - of_adapter) * dtype.itemsize,
        faults=(*faults, *uncovered),
    )


def land(view: EngineModule, layers: Collection[str]) -> tuple[dict[str, Landing], list[str]]:
    """Where layers of the trainer land, and a sentence for each one that does not, or that the engine objects to."""
    side = torch.empty(1, 1)
    landings, faults = {}, view.objections([Pair(layer, side, side, 1.0) for layer in layers])
    for layer in layers:
        try:
            landing = view.land(layer)
        except CannotLand as error:
            faults.append(f"{layer!r} cannot land: {error}")
            continue
        if landing is None:
            faults.append(f"{layer!r} is unknown")
        else:
            landings[layer] = landing
    return landings, faults


def cover(engine: nn.Module, landings: Mapping[str, Landing]) -> tuple[dict[str, list[Target]], list[str]]:
    """Weight -> its targets, and a sentence for each weight that has rows without a pair, or with two."""
    hit: dict[str, list[Target]] = {}
    for landing in landings.values():
        for target in landing.targets:
            hit.setdefault(target.weight, []).append(target)
    faults = []
    for weight, targets in hit.items():
        spans = sorted((target.rows.start, target.rows.stop) for target in targets)
        starts, stops = zip(*spans, strict=True)
        if starts != (0, *stops[:-1]) or stops[-1] != engine.get_parameter(weight).shape[0]:
            faults.append(f"of the rows of {weight!r}, pairs are for {spans}")
    return hit, faults


def prove() -> dict[str, Binding]:
    """All shipped families."""
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    with tempfile.NamedTemporaryFile() as store:
        parallel_state.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, sequence_parallel_degree=1, backend="gloo")
        _set_server_args()
        return {name: bind(name, family) for name, family in load_families().items()}


def _set_server_args() -> None:
    """What the models' constructors ask of the server's arguments: the defaults, resolved for one rank."""
    from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

    defaults = {each.name: each.default for each in fields(ServerArgs)}
    set_global_server_args(SimpleNamespace(**defaults | {"kv_gather_degree": 1}))


def page(found: Mapping[str, Binding]) -> str:
    """docs/families.md."""
    models = {name: f"| `{name}` | {family.model_id} |" for name, family in load_families().items()}
    proved, others = [], []
    for name, each in found.items():
        counts = f"{each.layers} | {each.targets} | {each.fused} |"
        if each.unproved:
            others.append(f"{models[name]} {each.unproved} | {counts if each.layers else '| | |'}")
        else:
            sizes = f"{each.lora_bytes / 2**20:.0f} MiB | {each.full_bytes / 2**30:.2f} GiB"
            proved.append(f"{models[name]} {counts} {sizes} | {each.lora_bytes / each.full_bytes:.2%} |")
    return PAGE_TEXT.format(
        versions=", ".join(f"{package} {version(package)}" for package in ("sglang", "diffusers", "peft")),
        proved="\n".join(proved),
        others="\n".join(others),
    )


def main() -> None:
    warnings.simplefilter("ignore")  # of sglang's imports
    found = prove()
    if "--write" in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(found))
    print(json.dumps({"page": page(found), "families": {name: asdict(each) for name, each in found.items()}}))


if __name__ == "__main__":
    main()
