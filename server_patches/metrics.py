"""Write the engine's record as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from server_patches.engine_record import EngineRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
_GAUGES = {
    "layers": "LoRA layers that are live.",
    "rounding_loss": "Share of the last update, by norm, that rounding to the weight's dtype removed.",
    "base_store_bytes": "Bytes of base weights that are kept for merging, on rank 0.",
}


class _Collector:
    def __init__(self, record: EngineRecord) -> None:
        self._record = record

    def collect(self) -> Iterator[Metric]:
        record = self._record
        yield CounterMetricFamily("sgld_lora_updates", "Updates that went live.", value=record.live_updates)
        yield CounterMetricFamily("sgld_lora_payload_bytes", "Bytes of accepted requests.", value=record.payload_bytes)
        failures = CounterMetricFamily("sgld_lora_failures", "Requests that failed, by reason.", labels=["reason"])
        for reason, count in record.failures.items():
            failures.add_metric([reason], count)
        yield failures
        stages = CounterMetricFamily(
            "sgld_lora_stage_seconds", "Seconds of accepted updates, by stage.", labels=["stage"]
        )
        for stage, seconds in record.stage_seconds.items():
            stages.add_metric([stage], seconds)
        yield stages
        yield GaugeMetricFamily(
            "sgld_lora_staged_bytes", "Bytes that wait for their commit.", value=record.staged_bytes
        )
        yield GaugeMetricFamily(
            "sgld_lora_failed", "1 when the engine must be restarted.", value=record.failed is not None
        )
        version = InfoMetricFamily("sgld_lora_weight_version", "The live version, by module.", labels=["module"])
        for name, module in record.modules.items():
            if module["weight_version"] is not None:
                version.add_metric([name], {"version": module["weight_version"]})
        yield version
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"sgld_lora_{field}", text, labels=["module"])
            for name, module in record.modules.items():
                if module[field] is not None:
                    gauge.add_metric([name], module[field])
            yield gauge


def text(record: EngineRecord) -> bytes:
    """Return everything in the record, in Prometheus' exposition format."""
    registry = CollectorRegistry()
    registry.register(_Collector(record))
    return generate_latest(registry)
