"""The HTTP contract: request and answer, and the checks of a request that need neither its payload nor a model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, from_json

from sgld_lora_merge.errors import SHOWN_FAULTS, LoraMergeError, RequestError, cut, in_short, summarise
from sgld_lora_merge.wire.limits import (
    LONGEST_LABEL,
    LONGEST_NAME,
    MOST_LAYERS,
    MOST_MODULES,
    MOST_PAYLOADS,
    MOST_SAMPLES,
    check_json,
)
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET

LORA_MERGE = "lora_merge"
DEFAULT_MODULE = "transformer"
DEFAULT_ADAPTER = "default"

UPDATE_ROUTE = "/update_weights_from_tensor"  # sglang's own
UPLOAD_ROUTE = "/lora_merge/upload"
COMMIT_ROUTE = "/lora_merge/commit"
ABORT_ROUTE = "/lora_merge/abort"
RESET_ROUTE = "/lora_merge/reset"
ROLLBACK_ROUTE = "/lora_merge/rollback"
VERIFY_ROUTE = "/lora_merge/verify"
RESOLVE_ROUTE = "/lora_merge/resolve"
STATUS_ROUTE = "/lora_merge/status"
METRICS_ROUTE = "/lora_merge/metrics"

ALPHA_IS_RANK: Final = "rank"  # stands where an alpha may: each layer's own rank, so that its scale is 1.0
Alpha = float | Literal["rank"]

MergeMode = Literal["merge", "dynamic", "mixed"]
Model = TypeVar("Model", bound=BaseModel)


LONGEST_FINGERPRINT = 48 * MOST_MODULES  # characters of one payload's
_BEYOND_LIMIT = "beyond_limit"  # the type of pydantic errors that are answered with 400
_RANK_MEANS = "alpha is each layer's own rank, so that its scale is 1.0"
Value = TypeVar("Value")


def _label(text: str) -> str:
    """Check that a text is short and printable: it comes back in answers, headers and log lines."""
    _check_length(text, LONGEST_LABEL)
    if not text.isprintable():
        raise PydanticCustomError(_BEYOND_LIMIT, "has a character that cannot be printed")
    return text


def _fingerprint(text: str) -> str:
    """Check the length of a payload's fingerprint: one for each of its modules."""
    _check_length(text, LONGEST_FINGERPRINT)
    return text


def _check_length(text: str, most: int) -> None:
    if len(text) > most:
        template = "has {length} characters, at most {most} are allowed"
        raise PydanticCustomError(_BEYOND_LIMIT, template, {"length": len(text), "most": most})


def _at_most(count: int, what: str) -> Callable[[Value], Value]:
    """Check the length of a list or an object before any of its items is looked at: each wrong one makes an error."""

    def check(value: Value) -> Value:
        if isinstance(value, (list, dict)) and len(value) > count:
            template = "has {length} " + what + ", at most {most} are allowed"
            raise PydanticCustomError(_BEYOND_LIMIT, template, {"length": len(value), "most": count})
        return value

    return check


def _short_names(layers: dict[str, Value]) -> dict[str, Value]:
    """Check the lengths of layer names."""
    for name in layers:
        _short_name(name)
    return layers


def _short_name(name: str) -> str:
    if len(name) > LONGEST_NAME:
        template = "has a layer name of {length} characters, at most {most} are allowed"
        raise PydanticCustomError(_BEYOND_LIMIT, template, {"length": len(name), "most": LONGEST_NAME})
    return name


def parse_alpha(text: str) -> Alpha:
    """Return the alpha that a text says.

    Raises:
        ValueError: it is neither a number nor "rank"; the message says both.
    """
    if text == ALPHA_IS_RANK:
        return ALPHA_IS_RANK
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'{in_short(text)} is neither a number nor "rank" ({_RANK_MEANS})') from None


def _alpha(value: Any, handler: ValidatorFunctionWrapHandler) -> Alpha:
    """Check an alpha: a text that says none is a wrong value, anything else that is no number a wrong type."""
    try:
        checked: Alpha = handler(value)
    except ValidationError:
        kind = "alpha_type"
        if isinstance(value, str):
            try:
                parse_alpha(value)  # "16" where a number is asked for is a wrong type
            except ValueError:
                kind = _BEYOND_LIMIT
        template = f'a number is needed, or "rank" ({_RANK_MEANS})'
        raise PydanticCustomError(kind, template) from None
    return checked


class _FirstFault(FailFast):
    """Stop at the first wrong item of a list. pydantic's own cannot be hashed, as a part of a union must be."""

    __hash__ = object.__hash__


Label = Annotated[str, AfterValidator(_label)]
_Alpha = Annotated[Alpha, WrapValidator(_alpha)]
_Labels = Annotated[list[Label], _FirstFault(), BeforeValidator(_at_most(MOST_MODULES, "entries"))]
_Payloads = Annotated[list[str], _FirstFault(), BeforeValidator(_at_most(MOST_PAYLOADS, "payloads"))]
_Uuids = Annotated[list[Label], _FirstFault(), BeforeValidator(_at_most(MOST_PAYLOADS, "entries"))]
_Fingerprints = Annotated[
    list[Annotated[str, AfterValidator(_fingerprint)]],
    _FirstFault(),
    BeforeValidator(_at_most(MOST_PAYLOADS, "entries")),
]
_few_modules = BeforeValidator(_at_most(MOST_MODULES, "modules"))
_few_layers = BeforeValidator(_at_most(MOST_LAYERS, "layers"))
_Scales = Annotated[dict[str, float], _few_layers, AfterValidator(_short_names)]


class FieldTypeError(LoraMergeError):
    """A field has the wrong type, "16" for a number."""

    status = 422
    reason = "request"


class UpdateRequest(BaseModel):
    """Body of ``POST /update_weights_from_tensor``. An absent field and null are the same: the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    serialized_named_tensors: _Payloads = Field(
        description="One base64 payload per rank; one for all only with a single worker or with CPU tensors."
    )
    payload_gpu_uuids: _Uuids | None = Field(
        None, description="The physical GPU each payload was exported from; a worker takes its own GPU's payload."
    )
    load_format: Label | None = Field(
        None, description='"flattened_bucket", or null for a list of (name, tensor) per module.'
    )
    target_modules: _Labels | None = Field(
        None,
        description='Pipeline modules; default ["transformer"]. A tensor is for the module whose list it is in, or for '
        "that of its name's prefix where the model family has routes.",
    )
    weight_update_mode: Label | None = Field(
        None, description='"lora_merge", or null for the engine\'s own full-weight update.'
    )
    lora_alpha: _Alpha | None = Field(
        None, description="Scale is alpha / rank; `rank` and null mean alpha = each layer's own rank, so scale 1.0."
    )
    lora_rank: int | None = Field(
        None, description="Must be the rank of every pair without an entry in layer_scaling; null checks nothing."
    )
    weight_version: Label | None = Field(None, description="Recorded when the update is live, reported by the status.")
    update_id: Label | None = Field(
        None, description="Names the update, which is then each target module's whole adapter."
    )
    bucket_index: int | None = Field(None, description="Place of this bucket in its update, from 0.")
    num_buckets: int | None = Field(None, description="Buckets of the update over all its modules.")
    commit: bool | None = Field(None, description="false: stay staged until POST /lora_merge/commit.")
    layer_scaling: Annotated[dict[Label, _Scales], _few_modules] | None = Field(
        None, description="module -> layer prefix -> the whole scale of that layer, in place of alpha / rank."
    )
    allow_partial: bool | None = Field(None, description="Leave out unknown layers and report them as skipped.")
    adapter: Label | None = Field(
        None, description="Which adapter of its modules this is; null is the default one. All of them add up."
    )
    payload_fingerprint: _Fingerprints | None = Field(
        None,
        description="One fingerprint per payload, of its buckets' bytes, to be compared with those that are opened.",
    )

    @property
    def modules(self) -> list[str]:
        return [DEFAULT_MODULE] if self.target_modules is None else self.target_modules


class UploadQuery(BaseModel):
    """Query of ``POST /lora_merge/upload``, whose body is a safetensors file: the module's whole adapter.

    Without ``target_module``, names go where the prefixes of the model family's routes say, and names without a prefix
    to the transformer; the file is the whole adapter of every module that it has names for, and no other one changes.
    With it, the file is for that module alone, and a prefix of another one's is refused.
    """

    model_config = ConfigDict(extra="ignore")

    target_module: Label | None = Field(None, description="The only module that the file is for.")
    lora_alpha: _Alpha | None = Field(
        None,
        description="Of layers for which the file has neither an alpha nor layer_scaling, and needed for those; `rank` "
        "means alpha = each layer's own rank, so scale 1.0.",
    )
    lora_rank: int | None = Field(
        None, description="Must be the rank of every pair without a scale of its own; null checks nothing."
    )
    weight_version: Label | None = Field(None, description="Recorded when the update is live, reported by the status.")
    update_id: Label | None = Field(None, description="Names the update; the same upload again gets the same answer.")
    commit: bool | None = Field(None, description="false: stay staged until POST /lora_merge/commit.")
    adapter: Label = Field(DEFAULT_ADAPTER, description="Which adapter of its modules this is.")


class ResetRequest(BaseModel):
    """Body of ``POST /lora_merge/reset``; an empty body means all adapters of all modules."""

    model_config = ConfigDict(strict=True, extra="ignore")

    target_modules: _Labels | None = Field(None, description="Only these modules; null means all.")
    adapter: Label | None = Field(None, description="Take out this adapter only, and leave the others.")


class RollbackRequest(BaseModel):
    """Body of ``POST /lora_merge/rollback``: nothing."""

    model_config = ConfigDict(strict=True, extra="ignore")


# JSON has no tuples: the list that stands for one is read, its numbers stay strict
_Sample = Annotated[tuple[int, int, float, float], Strict(False)]


_Samples = Annotated[list[_Sample], _FirstFault(), BeforeValidator(_at_most(MOST_SAMPLES, "samples"))]


class LayerExpectation(BaseModel):
    """What one layer's weight should be: exactly one of the three."""

    model_config = ConfigDict(strict=True, extra="forbid")

    sha256: Label | None = Field(None, description="sglang's checksum of the whole unsharded, contiguous weight.")
    samples: _Samples | None = Field(
        None, description="[row, column, value, ulps]: elements of the whole weight, and how far off they may be."
    )
    weight_sum: Label | None = Field(
        None,
        description="el64:<dtype>:<rows>x<columns>:<sum> of the whole weight, rounded to that dtype: one pass where "
        "the weight is, and no rank sends its part of it.",
    )


_Expectation = Annotated[LayerExpectation, BeforeValidator(_at_most(len(LayerExpectation.model_fields), "fields"))]
_Expectations = Annotated[dict[str, _Expectation], _few_layers, AfterValidator(_short_names)]
_LayerNames = Annotated[list[Annotated[str, AfterValidator(_short_name)]], _FirstFault(), _few_layers]


class VerifyRequest(BaseModel):
    """Body of ``POST /lora_merge/verify``: module -> layer prefix in the sender's names -> what it should be."""

    model_config = ConfigDict(strict=True, extra="ignore")

    modules: Annotated[dict[Label, _Expectations], _few_modules] = Field(
        description="module -> layer prefix -> what its weight should be, one of sha256, samples and weight_sum."
    )
    weights: Literal["live", "base"] = Field(
        "live", description="live: what the engine generates with; base: W0, which its merges start from."
    )


class ResolveRequest(BaseModel):
    """Body of ``POST /lora_merge/resolve``: module -> layer prefixes in the sender's names."""

    model_config = ConfigDict(strict=True, extra="ignore")

    modules: Annotated[dict[Label, _LayerNames], _few_modules] = Field(description="module -> layer prefixes.")


class TransactionRequest(BaseModel):
    """Body of ``POST /lora_merge/commit`` and ``/lora_merge/abort``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    update_id: Label = Field(description="Of an update that is staged.")


class ModuleAnswer(BaseModel):
    """What an update did to one module."""

    layers: int = Field(description="Layer prefixes, as the sender named them.")
    rounding_loss: float | None = Field(None, description="As in the answer, of this module alone.")
    merge_mode: MergeMode = Field("merge", description="As in the answer, of this module alone.")
    pairs_rounded: bool = Field(False, description="As in the answer, of this module alone.")
    kept: int = Field(0, description="Live layers that the request does not name; they keep the version they have.")
    versions: dict[str, int] = Field(
        {}, description="Version -> how many live layers have it; empty where no request said a version."
    )
    base: str = Field(
        "loaded", description='What W0 is: "loaded" when the engine started, else what has replaced it since.'
    )


class UpdateAnswer(BaseModel):
    """Answer to an update that is live on every rank, or to a bucket that is staged on every rank.

    Staged: nothing has changed yet; ``layers`` counts this bucket, ``weight_version`` is the live one, and the fields
    that only a merge knows are null.
    """

    success: Literal[True] = True
    message: str = Field(description="A sentence for people.")
    weight_version: str | None = Field(description="What the engine serves now; null for a mixture of versions.")
    state: Literal["live", "staged"] = Field("live", description="live: on every rank of every replica.")
    layers: int = Field(description="Layer prefixes, as the sender named them.")
    skipped: list[str] = Field([], description="Unknown layers that allow_partial left out.")
    ignored_fields: list[str] = Field([], description="Fields of the request that the contract does not know.")
    merge_mode: MergeMode | None = Field(
        None, description="merge: in the weights; dynamic: the layers add the low-rank product; mixed: some of each."
    )
    merge_precision: str | None = Field(None, description="fp32 or fp16.")
    base_store: str | None = Field(None, description="Where W0 is kept: device or host.")
    rounding_loss: float | None = Field(
        None, description="norm(W' - (W0 + sBA)) / norm(sBA): the share of the update that rounding took."
    )
    pairs_rounded: bool | None = Field(
        None, description="A or B of a pair was first rounded to the dtype of its weight, which the 0 mode does."
    )
    modules: dict[str, ModuleAnswer] = Field({}, description="What it did to each module.")
    payload_opened: list[bool] = Field([], description="By rank: whether its payload was opened.")
    timings_ms: dict[str, float] = Field({}, description="By stage, on the answering rank; the slowest replica's.")


class ErrorAnswer(BaseModel):
    """Answer to anything else: nothing at all has changed."""

    success: Literal[False] = False
    message: str = Field(description="All that was wrong, and what the engine serves now.")
    payload_opened: list[bool] = Field(
        [], description="By rank; an export that nobody opened is the sender's to release."
    )


def parse_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object; NaN and Infinity are read, so that the check of the field can name them.

    Raises:
        RequestError: not JSON, or not an object; or it has more parts than a body of its length may have.
    """
    check_json(body, "the body")
    try:
        fields = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the body is a JSON {type(fields).__name__}, not an object")
    return fields


def parse_fields(model: type[Model], fields: dict[str, Any]) -> tuple[Model, list[str]]:
    """Return the typed request, and the names of fields that the contract does not know: ten, each cut short.

    Raises:
        FieldTypeError: fields of a wrong type, all of them.
        RequestError: a required field is missing, or one is longer than it may be.
    """
    known = {name: value for name, value in fields.items() if name in model.model_fields and value is not None}
    try:
        request = model.model_validate(known)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        missing = [str(p["loc"][0]) for p in problems if p["type"] == "missing"]
        if missing:
            raise RequestError(*(f"{name} is required" for name in missing)) from error
        faults = [_describe(problem) for problem in problems]
        if any(problem["type"] == _BEYOND_LIMIT for problem in problems):
            raise RequestError(*faults) from None
        raise FieldTypeError(summarise(faults)) from None  # pydantic's own error holds all of the input
    unknown = heapq.nsmallest(SHOWN_FAULTS, fields.keys() - model.model_fields.keys())
    return request, [cut(name) for name in unknown]


def check_update(request: UpdateRequest) -> None:
    """Check values, ranges and combinations of an update's fields.

    Raises:
        RequestError: with all that is wrong.
    """
    faults: list[str] = []
    if not request.serialized_named_tensors:
        faults.append("serialized_named_tensors is empty")
    if request.weight_update_mode not in (None, LORA_MERGE):
        faults.append(f'weight_update_mode {in_short(request.weight_update_mode)} is unknown; "{LORA_MERGE}" or null')
    if request.load_format not in (None, FLATTENED_BUCKET):
        faults.append(f'load_format {in_short(request.load_format)} is unknown; "{FLATTENED_BUCKET}" or null')
    if not request.modules:
        faults.append("target_modules is empty")
    if len(set(request.modules)) != len(request.modules):
        faults.append(f"target_modules names a module twice: {request.modules[:SHOWN_FAULTS]}")
    faults.extend(_scaling_faults(request))
    uuids = request.payload_gpu_uuids
    if uuids is not None and len(uuids) != len(request.serialized_named_tensors):
        faults.append(
            f"payload_gpu_uuids needs one entry per payload: {len(uuids)} for "
            f"{len(request.serialized_named_tensors)} payloads"
        )
    if request.payload_fingerprint is not None:
        if request.load_format != FLATTENED_BUCKET:
            faults.append(f'payload_fingerprint is of buckets: it needs load_format "{FLATTENED_BUCKET}"')
        if len(request.payload_fingerprint) != len(request.serialized_named_tensors):
            faults.append(
                f"payload_fingerprint needs one entry per payload: {len(request.payload_fingerprint)} for "
                f"{len(request.serialized_named_tensors)} payloads"
            )
    if extra := sorted((request.layer_scaling or {}).keys() - set(request.modules)):
        faults.append(f"layer_scaling has modules that target_modules does not name: {extra[:SHOWN_FAULTS]}")
    if request.weight_update_mode is None:
        new = ("update_id", "bucket_index", "num_buckets", "commit", "layer_scaling", "allow_partial", "adapter")
        faults.extend(
            f'{name} belongs to weight_update_mode "{LORA_MERGE}"' for name in new if getattr(request, name) is not None
        )
    if request.adapter == "":
        faults.append("adapter is empty")
    faults.extend(_transaction_faults(request))
    if faults:
        raise RequestError(*faults)


def check_upload(query: UploadQuery) -> None:
    """Check values of an upload's query.

    Raises:
        RequestError: with all that is wrong.
    """
    faults = _scaling_faults(query)
    if query.update_id == "":
        faults.append("update_id is empty")
    if query.adapter == "":
        faults.append("adapter is empty")
    faults.extend(_commit_faults(query))
    if faults:
        raise RequestError(*faults)


def _commit_faults(request: UpdateRequest | UploadQuery) -> list[str]:
    if request.commit is False and request.update_id is None:
        return ["commit: false needs an update_id, by which it is committed later"]
    return []


def _scaling_faults(request: UpdateRequest | UploadQuery) -> list[str]:
    faults = []
    if isinstance(request.lora_alpha, float) and not math.isfinite(request.lora_alpha):
        faults.append(f"lora_alpha is {request.lora_alpha}; a finite number is needed")
    if request.lora_rank is not None and request.lora_rank < 1:
        faults.append(f"lora_rank is {in_short(request.lora_rank)}; it is at least 1")
    return faults


def _transaction_faults(request: UpdateRequest) -> list[str]:
    faults = []
    if request.update_id == "":
        faults.append("update_id is empty")
    if (request.bucket_index is None) != (request.num_buckets is None):
        faults.append("bucket_index and num_buckets go together")
    elif request.bucket_index is not None and request.num_buckets is not None:
        if request.update_id is None:
            faults.append("bucket_index and num_buckets need an update_id")
        if request.num_buckets < 1:
            faults.append(f"num_buckets is {in_short(request.num_buckets)}; it is at least 1")
        elif not 0 <= request.bucket_index < request.num_buckets:
            shown = f"{in_short(request.bucket_index)} is outside 0 to {in_short(request.num_buckets - 1)}"
            faults.append(f"bucket_index {shown}")
    return [*faults, *_commit_faults(request)]


def _describe(problem: Any) -> str:
    where = ".".join(cut(str(part)) for part in problem["loc"])
    return f"{where}: {problem['msg']}, got {in_short(problem['input'])}"
