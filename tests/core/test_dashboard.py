"""The dashboard's picture: its own queries, on what the metrics said."""

from __future__ import annotations

import json

import pytest

from support.dashboard import DASHBOARD, draw, evaluated, scrapes


def recorded(count=30):
    """Scrapes every five seconds: one update a second, of which each stage takes its milliseconds."""
    return scrapes(
        [
            json.dumps(
                {
                    "seconds": 5.0 * number,
                    "text": f"""# TYPE sgld_lora_updates counter
sgld_lora_updates_total {5.0 * number}
# TYPE sgld_lora_stage_seconds counter
sgld_lora_stage_seconds_total{{stage="merge"}} {0.04 * number}
sgld_lora_stage_seconds_total{{stage="total"}} {0.4 * number}
# TYPE sgld_lora_rounding_loss gauge
sgld_lora_rounding_loss{{module="transformer"}} 0.25
# TYPE sgld_lora_weight_version info
sgld_lora_weight_version_info{{module="transformer",version="{number}"}} 1.0
""",
                }
            )
            for number in range(count)
        ]
    )


def test_a_rate_is_over_the_minute_before():
    ((_, points),) = evaluated(
        '60 * rate(sgld_lora_updates_total{instance=~"$instance"}[$__rate_interval])', recorded()
    ).items()

    assert {round(value, 9) for _, value in points} == {60.0}
    assert points[0][0] == 35.0  # more than half a minute


def test_stages_are_divided_by_updates_and_the_total_is_left_out():
    query = (
        'rate(sgld_lora_stage_seconds_total{instance=~"$instance",stage!="total"}[$__rate_interval]) / '
        'ignoring(stage) group_left rate(sgld_lora_updates_total{instance=~"$instance"}[$__rate_interval])'
    )

    ((labels, points),) = evaluated(query, recorded()).items()

    assert labels == (("stage", "merge"),)
    assert {round(value, 9) for _, value in points} == {0.008}


def test_a_query_of_another_form_is_refused():
    with pytest.raises(ValueError, match="not read here: sum"):
        evaluated("sum(sgld_lora_failed)", recorded())


def test_every_panel_of_the_dashboard_is_drawn(tmp_path):
    draw(json.loads(DASHBOARD.read_text()), recorded(), tmp_path / "dashboard.png")

    assert (tmp_path / "dashboard.png").stat().st_size > 10_000
