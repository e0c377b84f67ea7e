"""Runs that train less than they seem to."""

from __future__ import annotations

import logging

from server_patches.run_warnings import RunWarnings


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_rounding_loss_that_stays_high_is_told_once_with_the_switch(caplog):
    warnings = RunWarnings()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warnings.after_update({"transformer": 0.7, "vae": 0.0})
        assert messages(caplog) == []
        for _ in range(20):
            warnings.after_update({"transformer": 0.7, "vae": 0.0})
    (message,) = messages(caplog)
    assert "rounding_loss is 0.70" in message
    assert "--lora-merge-mode dynamic" in message


def test_the_first_small_updates_of_a_run_are_not_worth_a_line(caplog):
    warnings = RunWarnings()
    with caplog.at_level(logging.WARNING):
        for loss in (0.9, 0.8, 0.3, 0.9, 0.8, 0.1):
            warnings.after_update({"transformer": loss})
    assert messages(caplog) == []


def test_branches_that_a_generation_did_not_use_are_named_once(caplog):
    warnings = RunWarnings()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warnings.after_generation({"transformer": ["blocks.0.attn.to_q.weight"], "vae": []})
    (message,) = messages(caplog)
    assert "blocks.0.attn.to_q.weight" in message
