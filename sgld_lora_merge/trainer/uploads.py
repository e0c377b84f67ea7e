"""All buckets as one safetensors file over HTTP, from the first rank to every engine, one after the other."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.adapter.file import adapter_bytes
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.sync_update import Contents, GatheredBucket, SyncUpdate
from sgld_lora_merge.trainer.transport import Answer, Transport


class ByUpload:
    """Collects the file in the host's memory of the first rank, and sends it when it is complete."""

    faults_on_stock: Sequence[str] = ("uploads are a route of its own; use --lora-ipc-weight-sync",)

    def __init__(self, args: Namespace, contents: Contents, transports: Sequence[Transport], _: int) -> None:
        ranks = Ranks(1, 1)
        self.engines = Engines(transports, ranks, transports if ranks.rank == 0 else [])
        self.extra_steps = len(transports)
        self._args, self._contents = args, contents
        self._tensors: dict[str, torch.Tensor] = {}

    def send(self, update: SyncUpdate, index: int, bucket: GatheredBucket) -> None:
        prefix = self._prefixes(update.modules)[update.buckets[index][0]]

        def keep() -> None:
            named = bucket.take()
            if self.engines.mine:
                self._tensors |= {prefix + name: tensor.cpu().contiguous() for name, tensor in named}
            named.clear()
            bucket.prepare_next()

        self.engines.run_on_all_ranks(keep)
        bucket.start_next()

    def finish(self, update: SyncUpdate, step: Callable[[], None]) -> list[Answer]:
        prefixes = self._prefixes(update.modules)
        scaling: dict[str, float] = {}
        fields: dict[str, Any] = {}
        for module, adapter in update.modules.items():
            fields = self._contents.fields(update, module, list(self._contents.layers(adapter)), stock=False)
            own_scales = (fields.pop("layer_scaling") or {}).get(module, {})
            scaling |= {prefixes[module] + layer: scale for layer, scale in own_scales.items()}
        del fields["weight_update_mode"]  # the route says it
        only = next(iter(update.modules)) if len(update.modules) == 1 else None
        query = {"target_module": only, **fields, "update_id": update.update_id}
        tensors, self._tensors = self._tensors, {}

        several = len(self.engines.transports) > 1
        if several:
            query["commit"] = False

        def upload() -> list[Answer]:
            file = adapter_bytes(tensors, scaling) if tensors else None
            answers = []
            for transport in self.engines.mine:
                answers.append(transport.update(query, file))
                step()
            return answers

        try:
            answers = self.engines.ranks.gather(self.engines.run_on_all_ranks(upload))[0]
        except Exception:
            if several:
                self.engines.abort(update.update_id)
            raise
        return self.engines.commit(update.update_id) if several else answers

    def abort(self, update: SyncUpdate) -> None:
        self._tensors = {}  # no engine has heard of it

    def _prefixes(self, modules: Mapping[str, Any]) -> dict[str, str]:
        """Return what tells a file's modules apart: prefixes of the model family's routes, where there are several.

        Raises:
            RequestError: the family has no route to a module.
        """
        if len(modules) == 1:
            return dict.fromkeys(modules, "")
        family = load_families().get(self._args.model_family)
        prefixes = {module: prefix for prefix, module in family.routes.items()} if family else {}
        if missing := sorted(modules.keys() - prefixes.keys()):
            raise RequestError(
                f"one file cannot carry {missing}: model family {self._args.model_family!r} has no route"
            )
        return prefixes
