"""``python -m fuzz TARGET [libFuzzer's options]`` fuzzes; ``python -m fuzz TARGET --replay`` reads the corpus again.

What it finds stays in ``fuzz/corpus/TARGET``, an input that fails in the working directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

LIMITS = ("-timeout=10", "-rss_limit_mb=3072", "-max_len=4096")  # seconds, MiB, bytes


def main(name: str, *options: str) -> None:
    torch.set_num_threads(1)
    folder = Path(__file__).parent / "corpus" / name
    if "--replay" in options:
        from fuzz.targets import TARGETS

        for file in sorted(folder.iterdir()):
            TARGETS[name].read(file.read_bytes())
        return
    import atheris

    sys.modules.pop("pickle")  # torch's stays as it is; ours is the pure-Python machine, which is to be seen
    with atheris.instrument_imports(include=["sgld_lora_merge", "pickle"]):
        from fuzz.targets import TARGETS, corpus
    corpus(name, folder)
    atheris.Setup([sys.argv[0], *LIMITS, *options, str(folder)], TARGETS[name].read)
    atheris.Fuzz()


main(*sys.argv[1:])
