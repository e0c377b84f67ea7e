"""A client that talks to an engine as code beside the HTTP routes does: with sglang's own request classes.

    python -m support.roads PORT SCHEDULER_PORT MODEL MODEL_ID

Each line of its input is JSON, and so is each line of its output after "ready":

    {"road": "socket", "fields": {...}}      an update, pickled onto the scheduler's socket
    {"road": "broker", "fields": {...}}      the same by the broker that listens beside the HTTP port
    {"road": "generator", "fields": {...}}   the same by the client of a `DiffGenerator` that is connected to the engine
    {"image": "a prompt"}                    the sha256 of an image that the `DiffGenerator` makes

With ``--local`` in place of the ports the `DiffGenerator` starts the engine itself, and only it is a road.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from typing import Any

import zmq
from sglang.multimodal_gen.configs.sample.sampling_params import DataType  # noqa: F401
from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
from sglang.multimodal_gen.runtime.scheduler_client import sync_scheduler_client
from sglang.multimodal_gen.runtime.server_args import ServerArgs


def by_socket(port: int, request: Any) -> Any:
    context = zmq.Context.instance()
    with context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(pickle.dumps(request))
        return pickle.loads(socket.recv())


def image(generator: DiffGenerator, prompt: str) -> str:
    fields = {"prompt": prompt, "width": 64, "height": 64, "num_inference_steps": 2, "seed": 7}
    result = generator.generate(sampling_params_kwargs=fields | {"save_output": False, "return_frames": True})
    frames = result.frames if not isinstance(result, list) else result[0].frames
    return hashlib.sha256(b"".join(bytes(frame) for frame in frames)).hexdigest()


def main() -> None:
    *ports, model, model_id = sys.argv[1:]
    common = {"model_path": model, "model_id": model_id, "backend": "sglang", "num_gpus": 1, "warmup_mode": "off"}
    local = ports == ["--local"]
    arguments = ServerArgs.from_kwargs(**common)
    if not local:  # set afterwards: given ports that are in use would be changed for free ones
        arguments.port, arguments.scheduler_port = map(int, ports)
        arguments.scheduler_ports = None
    generator = DiffGenerator.from_server_args(arguments, local_mode=local)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "image" in asked:
            answer = {"image": image(generator, asked["image"])}
        else:
            request = UpdateWeightFromTensorReqInput(**asked["fields"])
            match asked["road"]:
                case "socket":
                    output = by_socket(int(ports[1]), request)
                case "broker":
                    output = by_socket(int(ports[0]) + 1, request)
                case _:
                    output = sync_scheduler_client.forward(request)
            answer = output.output
        print(json.dumps(answer), flush=True)
    generator.shutdown()


if __name__ == "__main__":
    main()
