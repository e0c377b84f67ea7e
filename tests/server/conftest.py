"""One real engine for each configuration, started when the first test asks for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sgld_lora_merge import pack
from support import checkpoints, lora, server

TESTHOOK = Path(server.__file__).parent / "testhook"


@dataclass
class Engine:
    """A running engine, its checkpoint, and what its weights must be."""

    server: server.Server
    checkpoint: Path
    suffixes: tuple[str, ...]
    to_engine: Callable[[lora.Weights], lora.Weights]
    merge: Callable[..., torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)

    @cached_property
    def targets(self) -> lora.Weights:
        return lora.layers(lora.base_weights(self.checkpoint), self.suffixes)

    def adapter(self, seed: int = 1, **kwargs: Any) -> lora.Adapter:
        return lora.random_adapter(self.targets, seed=seed, **kwargs)

    def fields(
        self, adapter: lora.Adapter | list[tuple[str, torch.Tensor]], /, *, compact: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Body of an update with a fresh payload; ``None`` takes a field out. ``compact``: as our trainer packs it."""
        tensors = lora.named(adapter) if isinstance(adapter, dict) else adapter
        payload, self.sent = pack({"transformer": tensors}, compact=compact)
        body = {
            "serialized_named_tensors": [payload], "load_format": "flattened_bucket",
            "target_modules": ["transformer"], "weight_update_mode": "lora_merge", "lora_alpha": 6, "lora_rank": 4,
        } | fields  # fmt: skip
        return {name: value for name, value in body.items() if value is not None}

    def send(self, body: dict[str, Any]) -> httpx.Response:
        return self.server.post("/update_weights_from_tensor", body)

    def update(self, adapter: lora.Adapter | list[tuple[str, torch.Tensor]], /, **fields: Any) -> httpx.Response:
        return self.send(self.fields(adapter, **fields))

    def readable_adapter(self, seed: int) -> lora.Adapter:
        """Of rank 8 and layers whose pairs a kernel reads where they are: its update may take older memory."""
        pairs = self.adapter(seed=seed, rank=8).items()
        return {layer: (a, b) for layer, (a, b) in pairs if a.shape[1] % 8 == 0}

    def verified(self, weights: lora.Weights) -> None:
        """Our checker, whole layers in the sender's names, over all ranks."""
        layers = {layer: {"sha256": lora.sha256(weight)} for layer, weight in weights.items()}
        answer = self.server.post("/lora_merge/verify", {"modules": {"transformer": layers}})
        assert answer.json()["success"] is True, answer.text

    def reset(self) -> None:
        answer = self.server.post("/lora_merge/reset")
        assert answer.status_code == 200, answer.text

    def status(self) -> dict[str, Any]:
        return self.server.client.get("/lora_merge/status").json()

    def expect(self, adapter: lora.Adapter, scale: Any = 1.5) -> dict[str, str]:
        """Checksums of the engine's parameters with this adapter merged."""
        return lora.checksums(self.to_engine(lora.merged(self.targets, adapter, scale, self.merge)))

    def holds(self, checksums: dict[str, str]) -> None:
        """The stock checker agrees."""
        body = {"target_module": "transformer", "expected_named_tensors_sha256": checksums}
        answer = self.server.post("/update_weights_from_tensor_checker", body)
        assert answer.status_code == 200, answer.text

    def checksum(self) -> str:
        """The engine's own checksum over every parameter of the transformer on rank 0."""
        return self.server.post("/get_weights_checksum", {"module_names": ["transformer"]}).json()["transformer"]

    def testhook(self, action: str, **fields: Any) -> list[Any]:
        answer = self.server.post("/testhook", {"action": action, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["ranks"]


@pytest.fixture(scope="session")
def zimage_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.zimage(tmp_path_factory.mktemp("zimage"))


Serve = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture(scope="session")
def serve_zimage(zimage_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts Z-Image with any arguments: fp32 mode, bfloat16 weights."""

    @contextmanager
    def serve(*arguments: str, **env: str) -> Iterator[Engine]:
        folder = tmp_path_factory.mktemp("zimage_server")
        hooked = {"PYTHONPATH": str(TESTHOOK), **env}
        with server.running(zimage_checkpoint, "Z-Image", folder, arguments=arguments, env=hooked) as running:
            native = r"Loaded transformer: (FSDP)?ZImageTransformer2DModel \(sgl-diffusion version\)"
            assert re.search(native, running.log.read_text())
            yield Engine(running, zimage_checkpoint, lora.ZIMAGE_SUFFIXES, lora.engine_zimage, lora.merge_fp32)

    return serve


@pytest.fixture(scope="session")
def zimage_session(serve_zimage: Serve) -> Iterator[Engine]:
    """One worker. Uploads that are idle are cut five times as early as by default."""
    with serve_zimage("--num-gpus", "1", SGLD_LORA_UPLOAD_IDLE_S="12") as engine:
        yield engine


@pytest.fixture
def zimage(zimage_session: Engine) -> Engine:
    zimage_session.reset()
    return zimage_session


@contextmanager
def serve_sd3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Stable Diffusion 3, one worker, fp16 mode, bfloat16 weights."""
    checkpoint = checkpoints.sd3(tmp_path_factory.mktemp("sd3"))
    folder = tmp_path_factory.mktemp("sd3_server")
    env = {"SGLANG_DIFFUSION_LORA_MERGE_FP32": "0", "PYTHONPATH": str(TESTHOOK)}
    with server.running(checkpoint, "stable-diffusion-3-medium-diffusers", folder, env=env) as running:
        assert "Loaded transformer: SD3Transformer2DModel (sgl-diffusion version)" in running.log.read_text()
        yield Engine(running, checkpoint, lora.SD3_SUFFIXES, lora.engine_sd3, lora.merge_fp16)


@pytest.fixture(scope="session")
def sd3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with serve_sd3(tmp_path_factory) as engine:
        yield engine


@pytest.fixture
def sd3(sd3_session: Engine) -> Engine:
    sd3_session.reset()
    return sd3_session


@pytest.fixture
def sd3_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """For a test that leaves its engine in a state that others cannot use."""
    with serve_sd3(tmp_path_factory) as engine:
        yield engine


@pytest.fixture(scope="session")
def tp2_session(serve_zimage: Serve) -> Iterator[Engine]:
    """Two workers (tp 2, gloo)."""
    with serve_zimage("--num-gpus", "2", "--tp-size", "2", OMP_NUM_THREADS="1") as engine:
        yield engine


@pytest.fixture
def tp2(tp2_session: Engine) -> Engine:
    tp2_session.reset()
    return tp2_session
