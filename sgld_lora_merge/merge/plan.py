"""Data of an update, of its plan, and of what is live."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.base_store import BaseStore, Key
from sgld_lora_merge.merge.branches import Branch
from sgld_lora_merge.merge.kernels import MergeJob
from sgld_lora_merge.merge.module_view import Offloaded
from sgld_lora_merge.merge.resident import Adapters, Copy, all_pairs
from sgld_lora_merge.merge.targets import Target
from sgld_lora_merge.wire.bucket import Bucket
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER

TargetJob = tuple[Target, MergeJob]
Signature = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ModuleUpdate:
    """What one request does to one module.

    Attributes:
        module: name of the target module.
        pairs: its pairs; they may be views into the sender's memory, the plan copies them.
        whole: the pairs are the module's whole adapter, so that a target they do not name loses this adapter's update;
            otherwise such a target keeps what it has.
        allow_partial: leave out unknown layers, and report them, instead of refusing the update.
        faults: what was wrong before there were pairs; a plan reports it together with its own.
        adapter: which of the module's adapters this is; the others stay as they are.
    """

    module: str
    pairs: Sequence[Pair]
    whole: bool = False
    allow_partial: bool = False
    faults: Sequence[str] = ()
    adapter: str = DEFAULT_ADAPTER


@dataclass(frozen=True, eq=False)
class ModulePlan:
    """One module's part of a plan: what it will hold, what is written, what was left out.

    Attributes:
        before, after: the module's adapters.
        adapter: the one that an update changes; None for what is no update.
        whole: an update of the adapter as a whole, or no update.
        written: targets whose weight, or whose branch, changes.
        snapshots: W0 of those that are merged into for the first time. store_reason: why they are where they are.
        branches_before, branches_after: of those that are dynamic.
        offloaded: how weights are written that cannot be in place.
        jobs_before, jobs_after: the merges of those that can; made once, since a kernel prepares each job that it sees.
        scratch: for both, by device.
        bucket: whose views all pairs of the update are; the sender's memory, so it goes before the plan is kept.
        signature: of the update, where another one of the same signature may reuse this plan once it is free.
        copies: how that memory is filled. memory: all of it, where one copy of a bucket fills it.
        addresses: of the weights that the plan was made for.
        pairs_rounded: A or B of a pair that goes live is rounded before it is multiplied.
    """

    module: str
    before: Adapters
    after: Adapters
    written: tuple[Target, ...]
    adapter: str | None = None
    whole: bool = True
    snapshots: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    store_reason: str | None = None
    branches_before: Mapping[Key, Branch | None] = field(default_factory=dict)
    branches_after: Mapping[Key, Branch | None] = field(default_factory=dict)
    offloaded: Offloaded | None = None
    jobs_before: Sequence[TargetJob] = ()
    jobs_after: Sequence[TargetJob] = ()
    scratch: Mapping[torch.device, kernels.Scratch] = field(default_factory=dict)
    bucket: Bucket | None = None
    signature: Signature | None = None
    memory: torch.Tensor | None = None
    copies: Sequence[Copy] = ()
    addresses: Mapping[str, tuple[torch.device, int]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    pairs_rounded: bool = False

    @property
    def merged(self) -> list[Target]:
        """The written targets whose weight changes."""
        return [target for target in self.written if not target.dynamic]

    @property
    def merge_mode(self) -> str:
        """How the written targets hold the update: ``merge``, ``dynamic``, or ``mixed``."""
        modes = {"dynamic" if target.dynamic else "merge" for target in self.written}
        return modes.pop() if len(modes) == 1 else "mixed"


@dataclass(frozen=True, eq=False)
class Plan:
    """A checked update with all its memory; commit it once."""

    modules: tuple[ModulePlan, ...]

    @property
    def layers(self) -> int:
        return sum(len(module.layers) for module in self.modules)

    @property
    def skipped(self) -> list[str]:
        return [layer for module in self.modules for layer in module.skipped]


UNNAMED = "unnamed"  # stands in a mixture for layers whose request had no weight_version


@dataclass(frozen=True, eq=False)
class Versions:
    """Which requests made what is live in one module.

    Attributes:
        base: version of the weights that the module was loaded with; None where no request said one.
        layers: adapter -> layer prefix -> version of the request that wrote it last.
    """

    base: str | None = None
    layers: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    @functools.cached_property
    def counts(self) -> Mapping[str | None, int]:
        """Version -> how many layers have it, over all adapters."""
        return Counter(version for layers in self.layers.values() for version in layers.values())

    @property
    def is_mixed(self) -> bool:
        """Whether the live layers have more than one version, so that the module has none."""
        return len(self.counts) > 1

    @property
    def version(self) -> str | None:
        """The one version that the module has."""
        if not self.counts:
            return self.base
        return next(iter(self.counts)) if len(self.counts) == 1 else None

    @property
    def named_counts(self) -> dict[str, int]:
        """`counts` for people and JSON, sorted; empty where no layer has a version."""
        if self.counts.keys() <= {None}:
            return {}
        return dict(sorted((UNNAMED if version is None else version, n) for version, n in self.counts.items()))

    def layers_beside(self, plan: ModulePlan) -> int:
        """Return how many live layers a settled plan did not name, over all adapters; 0 where the plan is no update."""
        return sum(self.counts.values()) - len(plan.layers) if plan.adapter is not None else 0

    def after(self, plan: ModulePlan, version: str | None) -> Versions:
        """Return the versions once a plan is live: layers that it names have the new one, the others keep theirs."""
        layers = {name: self.layers.get(name, {}) for name in plan.after}
        if plan.adapter is not None:
            written = dict.fromkeys(plan.layers, version)
            if not plan.whole:
                there = {placed.pair.layer for placed in plan.after[plan.adapter].values()}
                kept = {layer: each for layer, each in layers[plan.adapter].items() if layer in there}
                written = kept | written
            layers[plan.adapter] = written
        return Versions(None, layers)


LOADED = "loaded"  # the base weights are those that the engine started with


@dataclass(eq=False)
class ModuleState:
    """What is live in one module, and what was before it (the pairs, not the weights).

    Attributes:
        base: what the base weights are, in words: `LOADED`, or what has replaced those.
        previous: before the last step, None where there is none to take back.
        open_step: version of the requests, each of some layers, that are the last step; the next one of this version
            belongs to it too.
        plans: of the last whole updates, the live one last; the first of three is free memory for the next update.
    """

    live: Adapters = field(default_factory=dict)
    previous: Adapters | None = None
    store: BaseStore = field(default_factory=BaseStore)
    versions: Versions = field(default_factory=Versions)
    previous_versions: Versions = field(default_factory=Versions)
    open_step: str | None = None
    rounding_loss: float | None = None
    base: str = LOADED
    plans: tuple[ModulePlan, ...] = ()

    @property
    def weight_version(self) -> str | None:
        """Of all that is live; None for a mixture."""
        return self.versions.version

    @property
    def pairs(self) -> list[Pair]:
        """Every live pair, of all adapters."""
        return all_pairs(self.live)
