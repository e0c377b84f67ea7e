"""Parts of pages that a command makes: they stand between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations


def with_part(page: str, name: str, content: str) -> str:
    """Return the page with one of its parts made anew.

    Raises:
        ValueError: the page has no such part, or two.
    """
    begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}{content}\n{rest[rest.index(end) :]}"
