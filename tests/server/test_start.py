"""What stops the engine at its start, with a sentence that says what to do; and what does not."""

from __future__ import annotations

import pytest

from support import server
from tests.server.conftest import TESTHOOK


def refused(checkpoint, folder, env):
    """The log of an engine that must not come up."""
    with pytest.raises(server.ServerDied) as died, server.running(checkpoint, "Z-Image", folder, env=env):
        pytest.fail("the engine came up")
    return str(died.value)


def test_an_unsupported_sglang_stops_the_start(zimage_checkpoint, tmp_path):
    metadata = tmp_path / "site" / "sglang-0.5.19.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.19\n")
    log = refused(zimage_checkpoint, tmp_path, {"PYTHONPATH": str(metadata.parent)})
    assert "sgld-lora-merge: sglang 0.5.19 is not supported, 0.5.21 or 0.5.22 or 0.5.23 is" in log
    assert "SGLANG_PLUGINS" in log


@pytest.mark.slow  # doctor's tests have the sentence
def test_a_hook_that_does_not_apply_stops_the_start(zimage_checkpoint, tmp_path):
    gone = "sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline.LoRAPipeline.convert_to_lora_layers"
    log = refused(zimage_checkpoint, tmp_path, {"PYTHONPATH": str(TESTHOOK), "SGLD_TESTHOOK_REMOVE": gone})
    assert f"could not be changed: {gone}" in log
    assert "exclude the plugin" in log


@pytest.mark.slow  # doctor's tests have the sentence
def test_variables_that_mean_nothing_stop_the_start_and_are_all_named(zimage_checkpoint, tmp_path):
    env = {"SGLANG_DIFFUSION_LORA_MERGE_FP32": "yes", "SGLD_LORA_API_KEY": "", "SGLD_LORA_MAX_BODY": "1"}
    log = refused(zimage_checkpoint, tmp_path, env)
    assert "SGLANG_DIFFUSION_LORA_MERGE_FP32='yes' is not a precision" in log
    assert "SGLD_LORA_API_KEY is set but empty" in log
    assert "SGLD_LORA_MAX_BODY is no variable of sgld-lora-merge; the nearest is SGLD_LORA_MAX_BODY_MB" in log


@pytest.mark.slow  # a killed rank is as silent: test_faults.py
def test_a_silent_rank_ends_in_an_answer_that_says_to_restart(zimage_checkpoint, tmp_path):
    """The agreement has a time limit: a rank that does not come is no reason to hang."""
    from sgld_lora_merge import pack
    from support import lora

    env = {"PYTHONPATH": str(TESTHOOK), "SGLD_LORA_AGREEMENT_TIMEOUT_S": "3", "OMP_NUM_THREADS": "1"}
    arguments = ("--num-gpus", "2", "--tp-size", "2")
    with server.running(zimage_checkpoint, "Z-Image", tmp_path, arguments=arguments, env=env) as running:
        targets = lora.layers(lora.base_weights(zimage_checkpoint), lora.ZIMAGE_SUFFIXES)
        payload, _buffers = pack({"transformer": lora.named(lora.random_adapter(targets))})
        running.post("/testhook", {"action": "fail", "rank": 1, "stage": "before_plan", "fault": "silence"})
        body = {
            "serialized_named_tensors": [payload],
            "load_format": "flattened_bucket",
            "weight_update_mode": "lora_merge",
        }
        answer = running.post("/update_weights_from_tensor", body)
        assert answer.status_code == 503
        assert "no agreement between 2 ranks within 3 s" in answer.json()["message"]
        assert "restart the engine" in answer.json()["message"]
        assert running.client.get("/health").status_code == 503
