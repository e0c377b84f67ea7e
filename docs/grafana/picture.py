"""The panels of dashboard.json over a minute of a real engine, drawn with matplotlib.

    python -m docs.grafana.picture     # writes panels.png beside it

A tiny Z-Image is served on the CPU. Every second an update is uploaded, of growing size and then of one; some requests
are wrong. The metrics are scraped each second, as a Prometheus would, and rates are those over the last ten scrapes.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import matplotlib
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save

from support import checkpoints, lora, server

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent
UPDATES, WINDOW = 60, 10
Series = dict[str, list[tuple[float, float]]]  # labels and values -> points


def scrape(engine: server.Server, into: dict[str, Series], seconds: float) -> None:
    """One scrape: each sample is a point of its metric's series, which its labels name."""
    for family in text_string_to_metric_families(engine.client.get("/lora_merge/metrics").text):
        for sample in family.samples:
            series = into.setdefault(sample.name, {})
            series.setdefault(" ".join(sample.labels.values()), []).append((seconds, sample.value))


def record(engine: server.Server, checkpoint: Path) -> dict[str, Series]:
    """Updates, mistakes and a reset, with a scrape after each; series by metric."""
    targets = lora.layers(lora.base_weights(checkpoint), lora.ZIMAGE_SUFFIXES)
    found: dict[str, Series] = {}
    started = time.monotonic()
    for step in range(1, UPDATES + 1):
        size = min(3e-3 * 1.1**step, 0.1)
        adapter = lora.random_adapter(targets, seed=step, size=size)
        alpha = "" if step % 15 == 0 else "lora_alpha=4&"  # without one it is refused
        route = f"/lora_merge/upload?{alpha}weight_version={step}"
        engine.client.post(route, content=save({name: each.contiguous() for name, each in lora.named(adapter)}))
        if step == UPDATES - 5:
            engine.post("/lora_merge/reset")
            engine.post("/lora_merge/rollback")
            engine.post("/lora_merge/commit", {"update_id": "none"})
        scrape(engine, found, time.monotonic() - started)
        time.sleep(max(0.0, started + step - time.monotonic()))
    return found


def rate(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Growth per second over the last points."""
    return [
        (now, (value - before) / (now - then))
        for (then, before), (now, value) in zip(points, points[WINDOW:], strict=False)
    ]


def rates(series: Series, factor: float = 1.0) -> Series:
    return {name: [(t, factor * value) for t, value in rate(points)] for name, points in series.items()}


def live_versions(series: Series) -> list[tuple[float, float]]:
    """Each version from when it was first seen; its labels are module and version."""
    return sorted((points[0][0], float(labels.split()[-1])) for labels, points in series.items())


def each_update(stages: Series, updates: Series) -> Series:
    (counted,) = rates(updates).values()
    return {
        stage: [
            (t, value / count if count else 0.0) for (t, value), (_, count) in zip(rate(points), counted, strict=True)
        ]
        for stage, points in stages.items()
        if stage != "total"
    }


def panels(found: dict[str, Series]) -> dict[str, Series]:
    """What each panel of the dashboard shows, by its title."""
    updates = found["sgld_lora_updates_total"]
    memory = {f"{module} W0": points for module, points in found["sgld_lora_base_store_bytes"].items()}
    return {
        "Must be restarted": found["sgld_lora_failed"],
        "Live version": {"version": live_versions(found["sgld_lora_weight_version_info"])},
        "LoRA layers that are live": found["sgld_lora_layers"],
        "Updates a minute": rates(updates, 60.0),
        "Failures a minute, by reason": rates(found["sgld_lora_failures_total"], 60.0),
        "Seconds an update, by stage": each_update(found["sgld_lora_stage_seconds_total"], updates),
        "rounding_loss": found["sgld_lora_rounding_loss"],
        "Memory for W0, and staged": memory | {"staged": found["sgld_lora_staged_bytes"][""]},
        "Bytes of requests a second": rates(found["sgld_lora_payload_bytes_total"]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoints.zimage(Path(folder) / "zimage")
        with server.running(checkpoint, "Z-Image", Path(folder) / "engine") as engine:
            found = record(engine, checkpoint)
    drawn = panels(found)
    titles = [panel["title"] for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]]
    figure, axes = plt.subplots(3, 3, figsize=(14, 8), layout="constrained")
    for axis, title in zip(axes.flat, titles, strict=True):
        for label, points in drawn[title].items():
            axis.plot(*zip(*points, strict=True), label=label or None)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        if any(drawn[title]):
            axis.legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.suptitle("A tiny model on a CPU; drawn from scraped metrics by docs/grafana/picture.py, not by Grafana")
    figure.savefig(FOLDER / "panels.png", dpi=90)


if __name__ == "__main__":
    main()
