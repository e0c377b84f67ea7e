"""The licences of what is installed beside the plugin: ``python -m support.licences > docs/licences.md``.

From the packages' own metadata, which is what their authors say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# Licences

The plugin is Apache-2.0. This is what it is installed with (`requirements/`), and the licence that each package names
in its metadata; `make licences` writes it anew. Nothing of theirs is copied into this repository.

The weights in `examples/` were trained on the digits of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten
Digits (UCI Machine Learning Repository, CC BY 4.0), as scikit-learn ships them; `examples/reader.safetensors` holds 50
of these.

| package | version | licence |
|---|---|---|"""


def pinned() -> dict[str, str]:
    """Package -> version, of every requirement file."""
    lines = [line for file in sorted((ROOT / "requirements").glob("*.txt")) for line in file.read_text().splitlines()]
    return dict(
        sorted(re.findall(r"^([\w.-]+)==([\w.]+)$", "\n".join(lines), re.MULTILINE), key=lambda p: p[0].lower())
    )


def licence(package: Distribution) -> str:
    """The expression, else what the classifiers say, else the first line of the text, else the title of its file."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = metadata.get_all("Classifier") or []
    if named := [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: OSI")]:
        return ", ".join(named)
    if text := metadata.get("License"):
        return str(text).strip().splitlines()[0]
    files = [file for file in package.files or () if file.name.upper().startswith("LICENSE")]
    titles = [re.search(r"\b(Apache|MIT|BSD)[\w -]*License", file.locate().read_text()) for file in files]
    return next((f"{title[0]} (its {files[0].name})" for title in titles if title), "not named")


def rows() -> Iterator[str]:
    for name, version in {**pinned(), "sglang": ""}.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another engine's version
            yield f"| {name} | {version} | not installed here |"
            continue
        yield f"| {name} | {package.version} | {licence(package)} |"


if __name__ == "__main__":
    print(HEAD)
    print("\n".join(sorted(rows(), key=str.lower)))
