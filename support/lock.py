"""Every package of this environment with the hash of its archive: ``python -m support.lock > requirements/lock.txt``.

For CI that must get the very archives that were tested: ``make install-locked``. A lock is for one Python on one kind
of machine. torch is not in it, since indexes serve different builds under one version; nor is this project.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = ("torch", "sgld-lora-merge", "sgld_lora_merge", "pip")


def pinned() -> list[str]:
    """``name==version`` of what is installed, sorted."""
    found = {(each.name, each.version) for each in distributions() if each.name not in LEFT_OUT}
    return sorted((f"{name}=={version}" for name, version in found), key=str.lower)


def hashed(requirements: list[str]) -> Iterator[str]:
    """The lines of a lock, as pip's own report of what it would install has them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", *words, *requirements], check=True, stderr=subprocess.DEVNULL)
        for each in json.loads(report.read_text())["install"]:
            name, version = each["metadata"]["name"], each["metadata"]["version"]
            yield f"{name}=={version} --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}"


def main() -> None:
    python = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    print(f"# {python}, {platform.system()} {platform.machine()}; made by python -m support.lock. All but torch.")
    print("\n".join(sorted(hashed(pinned()), key=str.lower)))


if __name__ == "__main__":
    main()
