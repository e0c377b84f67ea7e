"""The Grafana dashboard drawn from recorded answers of ``/lora_merge/metrics``, for its picture in the documentation.

    python -m support.dashboard SCRAPES docs/pictures/dashboard.png

SCRAPES has one JSON object a line: ``{"seconds": since the first, "text": what the route answered}``. The panels, their
places and their queries are the dashboard's own; of PromQL this reads what those queries use.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "dashboard.json"
WINDOW_S = 60.0  # of a rate
COLUMNS = 24  # of Grafana's grid
_SELECTOR = r"(?P<name>\w+)\{(?P<labels>[^}]*)\}"
_RATE = re.compile(rf"(?:(?P<factor>\d+) \* )?rate\({_SELECTOR}\[\$__rate_interval\]\)")
_GAUGE = re.compile(_SELECTOR)
_UNEQUAL = re.compile(r'(\w+)!="([^"]*)"')

Labels = tuple[tuple[str, str], ...]
Series = Mapping[Labels, list[tuple[float, float]]]  # by labels: seconds and value


@dataclass(frozen=True)
class Scrape:
    """One answer: when, and every sample by name and labels."""

    seconds: float
    samples: Mapping[str, Mapping[Labels, float]]


def scrapes(lines: Sequence[str]) -> list[Scrape]:
    found = []
    for line in lines:
        each = json.loads(line)
        samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(each["text"]):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        found.append(Scrape(each["seconds"], samples))
    return found


def evaluated(expression: str, found: Sequence[Scrape]) -> Series:
    """A query's series.

    Raises:
        ValueError: it has a form that no query of the dashboard had.
    """
    over, _, under = expression.partition(" / ignoring(stage) group_left ")
    top = _series(over, found)
    if not under:
        return top
    (bottom,) = _series(under, found).values()
    by_time = dict(bottom)
    return {
        labels: [(at, value / by_time[at]) for at, value in points if by_time.get(at)] for labels, points in top.items()
    }


def _series(expression: str, found: Sequence[Scrape]) -> Series:
    rate, gauge = _RATE.fullmatch(expression), _GAUGE.fullmatch(expression)
    match = rate or gauge
    if match is None:
        raise ValueError(f"a query of a form that is not read here: {expression}")
    without = _UNEQUAL.findall(match["labels"])
    series: dict[Labels, list[tuple[float, float]]] = {}
    for scrape in found:
        for labels, value in scrape.samples.get(match["name"], {}).items():
            if not any(item in labels for item in without):
                series.setdefault(labels, []).append((scrape.seconds, value))
    if rate is None:
        return series
    factor = float(rate["factor"] or 1)
    return {labels: list(_rates(points, factor)) for labels, points in series.items()}


def _rates(points: Sequence[tuple[float, float]], factor: float) -> Iterator[tuple[float, float]]:
    """Over the window before each point that has one."""
    first = 0
    for at, value in points:
        while points[first][0] < at - WINDOW_S:
            first += 1
        since, before = points[first]
        if at - since > WINDOW_S / 2:
            yield at, factor * (value - before) / (at - since)


def draw(dashboard: Mapping[str, Any], found: Sequence[Scrape], file: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(14, 0.38 * rows))
    for panel in panels:
        place = panel["gridPos"]
        corner = (place["x"] + 1) / COLUMNS, 1 - (place["y"] + place["h"] - 1.5) / rows
        axes = figure.add_axes((*corner, (place["w"] - 1.5) / COLUMNS, (place["h"] - 3) / rows))
        axes.set_title(panel["title"], loc="left", fontsize=10)
        shown = [
            (_told(labels), points)
            for target in panel["targets"]
            for labels, points in evaluated(target["expr"], found).items()
            if points
        ]
        if panel["type"] == "stat":
            axes.axis("off")
            now = [(label, points) for label, points in shown if points[-1][0] == found[-1].seconds]
            for position, (label, points) in enumerate(now):
                value = label if "version" in panel["title"] else f"{label} {points[-1][1]:g}"
                axes.text(0.5, 0.75 - 0.25 * position, value.strip(), ha="center", va="center", fontsize=18)
            continue
        for label, points in shown:
            axes.plot([at / 60 for at, _ in points], [value for _, value in points], label=label or None)
        if not shown:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="gray")
        axes.set_ylim(0, 1.15 * max((value for _, points in shown for _, value in points), default=1) or 1)
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.tick_params(labelsize=8)
        axes.set_xlabel("minutes", fontsize=8)
        if any(label for label, _ in shown):
            axes.legend(fontsize=7)
    figure.savefig(file, dpi=80)


def _told(labels: Labels) -> str:
    return ", ".join(value for _, value in labels)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(DASHBOARD.read_text()), scrapes(source.read_text().splitlines()), target)


if __name__ == "__main__":
    main()
