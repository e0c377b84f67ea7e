"""What `doctor` says in environments that are well, and in those that are not; each one is real."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.server import environment

pytest.importorskip("typer")
ROOT = Path(__file__).parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))


def doctor(python=sys.executable, **env):
    """Exit code, and checks by name."""
    words = [str(python), "-m", "sgld_lora_merge.cli", "doctor", "--json"]
    variables = environment({**env, "PYTHONPATH": f"{env.get('PYTHONPATH', '')}:{ROOT}"})
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Makes an environment with all packages of this one but some; its Python."""

    def make(*left_out):
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        for entry in PACKAGES.iterdir():
            if not entry.name.startswith((*left_out, "pip", "_distutils")):
                (folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / entry.name).symlink_to(entry)
        return folder / "bin" / "python"

    return make


def test_a_good_environment_is_well():
    code, checks = doctor()
    assert code == 0
    assert list(checks) == ["sglang", "plugin", "GPU", "sharing", "allocator", "/dev/shm", "precision", "settings"]
    assert {name: each["state"] for name, each in checks.items() if name in ("sglang", "plugin", "sharing")} == {
        "sglang": "ok",
        "plugin": "ok",
        "sharing": "ok",
    }
    assert checks["plugin"]["meaning"] == "sglang finds the plugin, and all hooks apply"


def test_no_sglang(without):
    code, checks = doctor(without("sglang"))
    assert code == 1
    assert checks["sglang"]["state"] == "failure"
    assert checks["sglang"]["meaning"] == "sglang is not installed"
    assert checks["sglang"]["remedy"] == "pip install 'sgld-lora-merge[engine]'"
    assert "plugin" not in checks


def test_an_sglang_that_is_not_supported(tmp_path):
    metadata = tmp_path / "sglang-0.5.19.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.19\n")
    code, checks = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert checks["sglang"]["meaning"].startswith("sglang 0.5.19 is not supported, 0.5.21 or ")
    assert checks["sglang"]["remedy"].startswith("install one of those")


def test_a_plugin_that_sglang_leaves_out():
    code, checks = doctor(SGLANG_PLUGINS="another")
    assert code == 1
    assert (checks["sglang"]["state"], checks["plugin"]["state"]) == ("ok", "failure")
    assert checks["plugin"]["meaning"] == "sglang leaves the plugin out"
    assert checks["plugin"]["remedy"] == "put sgld_lora_merge into SGLANG_PLUGINS, or unset it"


@pytest.mark.slow
def test_a_plugin_that_is_not_installed(without):
    code, checks = doctor(without("sgld_lora_merge-", "__editable__"))
    assert code == 1
    assert checks["plugin"]["meaning"] == "sglang cannot find the plugin"
    assert checks["plugin"]["remedy"].startswith("pip install sgld-lora-merge")


@pytest.mark.slow
def test_a_hook_that_does_not_apply():
    gone = "sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline.LoRAPipeline.convert_to_lora_layers"
    code, checks = doctor(PYTHONPATH=str(ROOT / "support" / "testhook"), SGLD_TESTHOOK_REMOVE=gone)
    assert code == 1
    assert checks["plugin"]["state"] == "failure"
    assert gone in checks["plugin"]["remedy"]


@pytest.mark.slow
def test_an_sglang_that_cannot_be_imported(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    code, checks = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert checks["sglang"]["meaning"] == "its import ended with: ImportError: libcuda.so.1 is missing"


def test_expandable_segments_and_a_precision_that_means_nothing(without):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "SGLANG_DIFFUSION_LORA_MERGE_FP32": "yes"}
    code, checks = doctor(without("sglang"), **settings)
    assert code == 1
    assert checks["allocator"]["state"] == checks["precision"]["state"] == "failure"
    assert checks["allocator"]["remedy"] == "unset it in the trainer: env -u PYTORCH_CUDA_ALLOC_CONF ..."


def test_a_folder_that_has_packages_of_our_names_is_not_run(without, tmp_path):
    """`python -m` puts the current folder in front of all others."""
    for name in ("server_patches", "sgld_lora_merge", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    words = [str(without("sglang")), "-P", "-m", "sgld_lora_merge.cli", "doctor", "--json"]
    variables = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert not (tmp_path / "was_run").exists()
    assert checks["sglang"]["meaning"] == "sglang is not installed"
    assert checks["sharing"]["state"] == "ok"


def test_a_variable_that_means_nothing_is_a_failure(without):
    code, checks = doctor(without("sglang"), SGLD_LORA_VERIFY="true", SGLD_LORA_APIKEY="k")
    assert (code, checks["settings"]["state"]) == (1, "failure")
    assert "SGLD_LORA_VERIFY='true'" in checks["settings"]["meaning"]
    assert "the nearest is SGLD_LORA_API_KEY" in checks["settings"]["meaning"]
