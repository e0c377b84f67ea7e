"""What an engine's answers must have for a trainer or the command line to go on. More may be in them."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from sgld_lora_merge.wire.schema import COMMIT_ROUTE, RESOLVE_ROUTE, STATUS_ROUTE, VERIFY_ROUTE

Value = TypeVar("Value")


def _at_most(limit: int) -> Callable[[Any], Any]:
    """Refuse a longer list or object before its entries are looked at, each of which might be a fault that is kept."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > limit:
            raise ValueError(f"it has {len(value)} entries, at most {limit} are read")
        return value

    return check


Some = Annotated[Value, BeforeValidator(_at_most(1000))]
Many = Annotated[Value, BeforeValidator(_at_most(20_000))]


class Answered(BaseModel):
    """Any answer that says success."""

    model_config = ConfigDict(strict=True, extra="ignore")

    success: Literal[True]


class Refusal(BaseModel):
    """Any other answer, as far as it can be read."""

    model_config = ConfigDict(strict=True, extra="ignore")

    message: str = ""
    payload_opened: Some[list[bool]] = []


class ModuleVersion(BaseModel):
    """One module of a status."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_version: str | None
    versions: Some[dict[str, int]] | None = None


class UpdateState(BaseModel):
    """What became of one update."""

    model_config = ConfigDict(strict=True, extra="ignore")

    update_id: str
    state: str
    weight_version: str | None = None


class Status(Answered):
    """Of ``GET /lora_merge/status``."""

    modules: Some[dict[str, ModuleVersion]]
    updates: Some[list[UpdateState]]


class ChangedModule(BaseModel):
    """One module of a change."""

    model_config = ConfigDict(strict=True, extra="ignore")

    merge_mode: Literal["merge", "dynamic", "mixed"] = "merge"


class Changed(Answered):
    """Of a change that names the modules it is live in."""

    modules: Some[dict[str, ChangedModule]]


class Merged(Changed):
    """Of an update that can be verified: in which precision it was merged."""

    merge_precision: Literal["fp32", "fp16"]


class Place(BaseModel):
    """Where a layer would land."""

    model_config = ConfigDict(strict=True, extra="ignore")

    module: str
    layer: str
    weight: str
    sections: Some[list[int | str]]
    shape: Some[list[int]]
    dtype: str
    merge_mode: str


class NoPlace(BaseModel):
    """Why a layer would not land."""

    model_config = ConfigDict(strict=True, extra="ignore")

    fault: str


class Resolved(Answered):
    """Of ``POST /lora_merge/resolve``."""

    modules: Some[dict[str, Many[dict[str, NoPlace | Place]]]]


class Verified(Answered):
    """Of ``POST /lora_merge/verify``."""

    message: str


class UpdateShown(Answered):
    """Of an update, as the command line shows it."""

    message: str
    weight_version: str | None
    rounding_loss: float | None = None
    merge_precision: str | None = None
    timings_ms: Some[dict[str, float]]


class Shape(BaseModel):
    """What a module or an adapter holds."""

    model_config = ConfigDict(strict=True, extra="ignore")

    layers: int
    rank: int | list[int] | None
    scale: float | list[float] | None


class ShownModule(ModuleVersion, Shape):
    """One module of a status, as tables show it."""

    state: str
    adapters: Some[dict[str, Shape]]
    merge_precision: Literal["fp32", "fp16"]
    rounding_loss: float | None


class ShownUpdate(UpdateState):
    """What became of one update, as tables show it."""

    num_buckets: int
    buckets: Many[list[int]]
    reason: str | None


class Totals(BaseModel):
    """Counts since the engine started."""

    model_config = ConfigDict(strict=True, extra="ignore")

    updates: int
    failures: Some[dict[str, int]]


class ShownStatus(Answered):
    """A status with all that the command line shows."""

    modules: Some[dict[str, ShownModule]]
    updates: Some[list[ShownUpdate]]
    totals: Totals
    sleeping: bool


FORMS: dict[str, type[Answered]] = {
    STATUS_ROUTE: Status,
    COMMIT_ROUTE: Changed,
    RESOLVE_ROUTE: Resolved,
    VERIFY_ROUTE: Verified,
}
