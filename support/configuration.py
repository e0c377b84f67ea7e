"""The table of docs/configuration.md, made from `sgld_lora_merge.settings`.

python -m support.configuration            # prints the page
python -m support.configuration --write    # and writes it
"""

from __future__ import annotations

import sys
from pathlib import Path

from sgld_lora_merge.settings import variables
from support.pages import with_part

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def page(text: str) -> str:
    """Return the page with its table made anew."""
    rows = [
        f"| `{each.name}` | {each.unit} | {each.default or 'none'} | {each.meaning} |" for each in variables().values()
    ]
    return with_part(
        text, "variables", "\n".join(("| variable | unit | default | meaning |", "|---|---|---|---|", *rows))
    )


if __name__ == "__main__":
    made = page(PAGE.read_text())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made)
    sys.stdout.write(made)
