"""Print results for people, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgld_lora_merge.cli.doctor import Check
from sgld_lora_merge.cli.inspection import AdapterReport
from sgld_lora_merge.cli.pushing import Mapped
from sgld_lora_merge.errors import name_some
from sgld_lora_merge.trainer.transport import Answer

_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table; a heading that ends in > is that of numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(
            heading.removesuffix(">"), justify="right" if heading.endswith(">") else "left", overflow="fold"
        )
    return made


def checks(found: Sequence[Check]) -> Table:
    made = table("", "state", "what it means", "what to do")
    for check in found:
        _add(made, check.name, Text(check.state, _COLOURS[check.state]), check.meaning, check.remedy)
    return made


def modules(known: Answer) -> Table:
    """Return every module of the engine, and under it the adapters of those that have several."""
    made = table("module", "state", "version", "layers>", "rank>", "scale>", "precision", "rounding loss>")
    for name, each in known["modules"].items():
        cells = [name, each["state"], _text(each["weight_version"]), *_shape(each), each["merge_precision"]]
        _add(made, *cells, _text(each["rounding_loss"]))
        if len(each["adapters"]) > 1:
            for adapter, own in each["adapters"].items():
                _add(made, f"  {adapter}", "", "", *_shape(own))
    return made


def updates(known: Answer) -> Table:
    made = table("update", "what became of it", "version", "buckets>", "why")
    for each in known["updates"]:
        buckets = f"{len(each['buckets'])} of {each['num_buckets']}"
        _add(made, each["update_id"], each["state"], _text(each["weight_version"]), buckets, _text(each["reason"]))
    return made


def mapping(found: Sequence[Mapped]) -> Table:
    made = table("layer", "rank>", "scale>", "where it lands")
    for each in found:
        where = Text(each.fault, "red") if each.fault else f"{each.module}: {each.target}"
        _add(made, each.layer, str(each.rank), f"{each.scale:g}", where)
    return made


def report(found: AdapterReport) -> Table:
    with_base = found.rounding_loss is not None
    extra = ("of the base>", "rounding loss>") if with_base else ()
    made = table("layer", "shape", "rank>", "scale>", "dtype", "norm>", *extra)
    for each in found.layers:
        cells = [each.layer, " x ".join(map(str, each.shape)), str(each.rank), f"{each.scale:g}", each.dtype]
        with_its = [_text(each.relative), _text(each.rounding_loss)] if with_base else []
        _add(made, *cells, f"{each.norm:.4g}", *with_its)
    return made


def _add(made: Table, *cells: str | Text) -> None:
    """Add a row of plain text: names may hold what rich would take for markup."""
    made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _shape(shape: dict[str, Any]) -> list[str]:
    return [str(shape["layers"]), _text(shape["rank"]), _text(shape["scale"])]


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def print_message(console: Console, answer: dict[str, Any]) -> None:
    console.print(answer["message"], markup=False)


def print_status(console: Console, known: dict[str, Any]) -> None:
    console.print(modules(known))
    if known["updates"]:
        console.print()
        console.print(updates(known))
    totals, sleeping = known["totals"], ", asleep" if known["sleeping"] else ""
    console.print(f"\n{totals['updates']} updates, {sum(totals['failures'].values())} failures{sleeping}")


def print_mapping(console: Console, mapped: Sequence[Mapped]) -> None:
    console.print(mapping(mapped))
    bad = sum(bool(each.fault) for each in mapped)
    console.print(f"\n{len(mapped) - bad} of {len(mapped)} layers would land; nothing was sent")


def print_answer(console: Console, answer: dict[str, Any]) -> None:
    console.print(f"{answer['message']}, weight_version {answer['weight_version']}", markup=False)
    if answer["rounding_loss"] is not None:
        console.print(f"rounding took {answer['rounding_loss']:.2%} of the update ({answer['merge_precision']})")
    times = ", ".join(f"{stage} {milliseconds:.1f} ms" for stage, milliseconds in answer["timings_ms"].items())
    console.print(times, markup=False)
    if "verified" in answer:
        console.print(f"verified: {answer['verified']}", markup=False)


def print_report(console: Console, found: AdapterReport) -> None:
    console.print(report(found))
    targets = ", ".join(f"{name} ({count})" for name, count in found.target_modules.items())
    console.print(f"\n{len(found.layers)} layers, {found.nbytes / 2**20:.1f} MiB of A and B")
    console.print(f"target modules: {targets}", markup=False)
    if found.rounding_loss is not None:
        console.print(f"rounding would take {found.rounding_loss:.2%} of the update, by norm")
    if found.beyond:
        console.print(f"not in the family's target modules: {name_some(found.beyond)}", markup=False)
    if found.missing:
        console.print(f"target modules of the family that no layer has: {name_some(found.missing)}", markup=False)
