"""Read a request: the payload or the file of this rank becomes pairs by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_world_group

from server_patches.engine_states import EngineStates
from server_patches.request_context import RequestContext
from server_patches.worker_request import MergeReq
from sgld_lora_merge.adapter.families import Family, route, route_layers, routes_of
from sgld_lora_merge.adapter.file import read_adapter
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.errors import RequestError, in_short, name_some
from sgld_lora_merge.merge.engine import ModuleUpdate
from sgld_lora_merge.merge.fingerprint import SentUpdates, payload_fingerprint
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.limits import check_name
from sgld_lora_merge.wire.payload import NamedTensors, cuda_device_index, decode, named_tensors, normalised_uuid
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER, DEFAULT_MODULE


class RequestReader:
    """Reads requests on one rank.

    Args:
        states: the engine's modules.
        families: whose routes say to which module a tensor with a prefix belongs.
    """

    def __init__(self, states: EngineStates, families: Mapping[str, Family]) -> None:
        self._states = states
        self._families = families

    @property
    def routes(self) -> Mapping[str, str]:
        """Return prefix of tensor names -> module, as the families of the loaded transformer's class have them."""
        return routes_of(type(self._states.modules().get(DEFAULT_MODULE)), self._families)

    def modules(self, req: MergeReq) -> list[str]:
        """Return the modules that a request may be for, before the names of its tensors are read."""
        return req.target_modules or [DEFAULT_MODULE, *self.routes.values()]

    def updates(self, context: RequestContext) -> list[ModuleUpdate]:
        """Read the pairs of every module. Faults of pairs are in the updates, not raised.

        Raises:
            RequestError: the payload cannot be read.
        """
        req = context.req
        with context.stage("deserialize"):
            by_module, scaling = self._open(context)
        with context.stage("validate"):
            updates = []
            views = self._states.views()
            for name, named in by_module.items():
                pairing = pair_up(
                    named,
                    alpha=req.lora_alpha,
                    rank=req.lora_rank,
                    layer_scaling=scaling.get(name),
                    alpha_required=req.upload_path is not None,
                )
                faults = list(pairing.faults)
                if name in views and not faults:
                    faults += views[name].objections(pairing.pairs)
                adapter = req.adapter or DEFAULT_ADAPTER
                updates.append(
                    ModuleUpdate(name, pairing.pairs, req.is_whole_adapter, req.allow_partial, faults, adapter)
                )
            context.sent = SentUpdates(updates, bits=req.upload_path is None)  # all ranks read one file of an upload
            return updates

    def full_weights(self, context: RequestContext) -> Mapping[str, NamedTensors]:
        """Read the tensors of a full-weight update by module, as sglang's own updater takes them.

        Raises:
            RequestError: the payload cannot be read.
            ConflictError: the engine is asleep.
        """
        self._states.refuse_sleep()
        named = _named_tensors(context, context.req.target_modules or [DEFAULT_MODULE])
        for tensors in named.values():
            for name, _ in tensors:
                check_name(name)
        return named

    def _open(
        self, context: RequestContext
    ) -> tuple[Mapping[str, Collection[tuple[str, torch.Tensor]]], Mapping[str, Mapping[str, float]]]:
        """Read named tensors and layer scaling, both by the module that they are for."""
        req, routes = context.req, self.routes
        sent, sent_scaling = self._open_as_sent(context, routes.values())
        named = route(sent, routes, req.target_modules)
        scaling = route_layers(sent_scaling, routes, req.target_modules)
        modules = req.target_modules or [*dict.fromkeys((*named, *scaling))] or [DEFAULT_MODULE]
        # a module for which nothing came stays, to be refused together with all that is wrong
        return {module: named.get(module, []) for module in modules}, scaling

    def _open_as_sent(
        self, context: RequestContext, routed: Collection[str]
    ) -> tuple[Mapping[str, NamedTensors], Mapping[str, Mapping[str, float]]]:
        """Read named tensors and layer scaling, both by the module whose list they are in."""
        req = context.req
        modules = req.target_modules or [DEFAULT_MODULE]
        if req.upload_path is not None:
            (module,) = modules
            named, scaling = read_adapter(req.upload_path)
            context.opened = True
            return {module: named}, {module: scaling}
        return _named_tensors(context, modules, routed), req.layer_scaling or {}


def _named_tensors(
    context: RequestContext, modules: Sequence[str], routed: Collection[str] = ()
) -> Mapping[str, NamedTensors]:
    """Read this rank's payload by module, and check its bytes against the sender's fingerprint.

    Raises:
        RequestError: the payload cannot be read, or its fingerprint differs.
    """
    req = context.req
    place = _own_place(req)
    content = _content(req.serialized_named_tensors[place], context)
    named = named_tensors(content, req.load_format, modules, routed)
    if req.payload_fingerprint is not None:
        sent = req.payload_fingerprint[place]
        found = payload_fingerprint({name: each["flattened_tensor"] for name, each in content.items()})
        if sent != found:
            raise RequestError(
                f"payload_fingerprint is {in_short(sent)}, the bytes that were opened have {found!r}: the sender's "
                "memory was released or written after it was fingerprinted, or it fingerprints something else"
            )
    return named


def _content(payload: str, context: RequestContext) -> Any:
    """Open a payload with the plugin's own unpickler: sglang's has no memory limit, and imports by name.

    Where a request has fewer payloads than there are ranks, several ranks read one, and the first rank releases it.
    """
    world = get_world_group()  # of all replicas
    shared = len(context.req.serialized_named_tensors) < world.world_size
    reader = PayloadReader(cuda_device_index, shared=shared, releases=world.rank_in_group == 0 or not shared)
    try:
        content = decode(payload, reader)
        reader.opened = True  # tensors may also have come inline, without a handle
    finally:
        context.opened = reader.opened
    return content


def _own_place(req: MergeReq) -> int:
    """Return the index of the payload that this rank reads: by GPU where the request names GPUs, else by rank.

    Raises:
        RequestError: there is none for it.
    """
    payloads, uuids = req.serialized_named_tensors, req.payload_gpu_uuids
    if uuids is not None and torch.cuda.is_available():
        own = normalised_uuid(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        for place, uuid in enumerate(uuids):
            if normalised_uuid(uuid) == own:
                return place
        raise RequestError(
            f"no payload was exported from this worker's GPU {own}; payload_gpu_uuids has {name_some(uuids)}"
        )
    if len(payloads) == 1:
        return 0
    world = get_world_group()
    if len(payloads) != world.world_size:
        raise RequestError(
            f"serialized_named_tensors has {len(payloads)} payloads; one is needed, or one for each of "
            f"{world.world_size} workers"
        )
    return int(world.rank_in_group)
