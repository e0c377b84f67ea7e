"""Flags, what they choose, and what the engine is told."""

from __future__ import annotations

import argparse

import pytest

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.trainer import (
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
    add_lora_arguments,
    engine_config,
    engine_environment,
    select_weight_sync,
    validate_lora_arguments,
)

FULL = ["--use-lora", "--lora-rank", "4", "--lora-alpha", "6.5", "--lora-target-modules", "to_q", "to_k"]


def parsed(*flags, validate=True):
    parser = argparse.ArgumentParser()
    add_lora_arguments(parser)
    args = parser.parse_args(flags)
    return validate_lora_arguments(args) if validate else args


def test_a_family_fills_what_is_left_open_and_nothing_else():
    args = parsed("--use-lora", "--model-family", "zimage", "--lora-rank", "8")
    assert (args.lora_rank, args.lora_alpha, args.diffusion_forward_dtype) == (8, 128, "bf16")
    assert args.lora_target_modules == ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"]
    assert args.update_weight_buffer_size == 2 * 2**30
    assert args.update_weight_target_module == "transformer"


def test_without_a_family_the_buffer_and_the_dtype_have_defaults():
    args = parsed(*FULL)
    assert (args.update_weight_buffer_size, args.diffusion_forward_dtype) == (2 * 2**30, "bf16")
    assert (args.lora_alpha, args.lora_target_modules) == (6.5, ["to_q", "to_k"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lora-ipc-weight-sync"], ["--lora-ipc-weight-sync needs --use-lora", "needs --colocate"]),
        ([*FULL, "--lora-ipc-weight-sync"], ["--lora-ipc-weight-sync needs --colocate"]),
        (["--lora-upload-weight-sync"], ["--lora-upload-weight-sync needs --use-lora"]),
        ([*FULL, "--colocate", "--lora-ipc-weight-sync", "--lora-upload-weight-sync"], ["choose one"]),
        (["--use-lora"], ["needs --lora-rank", "needs --lora-alpha", "needs --lora-target-modules"]),
        ([*FULL, "--lora-rank", "0"], ["--lora-rank is 0"]),
        ([*FULL, "--lora-alpha", "nan"], ["--lora-alpha is nan"]),
        ([*FULL, "--update-weight-buffer-size", "0"], ["--update-weight-buffer-size is 0"]),
    ],
)
def test_flags_that_do_not_go_together_are_refused_all_at_once(flags, told, capsys):
    with pytest.raises(LoraMergeError) as caught:
        parsed(*flags)
    assert all(sentence in str(caught.value) for sentence in told)
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit):
        validate_lora_arguments(parsed(*flags, validate=False), parser)
    assert told[0] in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "mode"), [("fp32", "1"), ("bf16", "0"), ("fp16", "0")])
def test_the_engine_merges_as_the_trainer_computes(dtype, mode):
    args = parsed(*FULL, "--diffusion-forward-dtype", dtype)
    assert engine_environment(args) == {"SGLANG_DIFFUSION_LORA_MERGE_FP32": mode}


def test_the_engine_is_told_the_target_modules():
    assert engine_config(parsed(*FULL)) == {"lora_target_modules": ["to_q", "to_k"]}
    assert engine_config(parsed()) == {}


def test_the_flags_choose_the_strategy():
    ipc, upload = parsed(*FULL, "--colocate", "--lora-ipc-weight-sync"), parsed(*FULL, "--lora-upload-weight-sync")
    assert select_weight_sync(parsed()) is DiffusionUpdateWeightFromTensor
    assert select_weight_sync(parsed(*FULL)) is DiffusionUpdateWeightFromTensorLoRA
    assert select_weight_sync(ipc) is DiffusionUpdateWeightFromTensorLoRAIPC
    assert select_weight_sync(upload) is DiffusionUpdateWeightLoRAUpload
