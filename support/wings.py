"""The picture of the wings in docs/architecture.md, made from the imports: which wing imports which.

    python -m support.wings            # prints the figures of the tree and the picture; ends with 1 on a fault
    python -m support.wings --write    # puts the picture into the page

A fault is a circle of imports, or a wing that imports one to the right of it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.pages import with_part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("sgld_lora_merge", "server_patches")
WINGS = ("errors, settings", "wire", "adapter", "merge", "trainer", "rollout", "cli", "server_patches")
ALLOWED = {wing: set(WINGS[:place]) for place, wing in enumerate(WINGS)}
ALLOWED["cli"] -= {"rollout"}
ALLOWED["server_patches"] -= {"trainer", "rollout", "cli"}
PUBLIC = "public names"  # of the package: they come from anywhere, and no module of the project imports them
ALLOWED[PUBLIC] = set(WINGS)
# `sgld_lora_merge.trainer` has two public names that need Ray, and imports them when they are asked for
LAZY = {("sgld_lora_merge.trainer", "sgld_lora_merge.rollout.manager")}
SHORT = 60  # lines


@dataclass(frozen=True)
class Module:
    """One file.

    Attributes:
        name: with dots.
        wing: that it stands in.
        lines: of the file.
        longest_class: its name and its lines; ("", 0) without classes.
        imports: names of this project's modules that it imports, at any place in the file.
    """

    name: str
    wing: str
    lines: int
    longest_class: tuple[str, int]
    imports: frozenset[str]


def modules(root: Path = ROOT) -> dict[str, Module]:
    """Read every module of the packages, by name."""
    found = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    files = {_name(file.relative_to(root)): file for file in found}
    made = {}
    for name, file in files.items():
        text = file.read_text()
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        classes = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in nodes]
        imported = frozenset(each for each in _imported(tree, files) if each != name)
        longest = max(classes, key=lambda each: each[1], default=("", 0))
        made[name] = Module(name, _wing(name), len(text.splitlines()), longest, imported)
    return made


def faults(made: Mapping[str, Module]) -> list[str]:
    """Say what is wrong: circles, and imports of a wing to the right."""
    arrows = {name: [each for each in module.imports if (name, each) not in LAZY] for name, module in made.items()}
    found = [
        f"{name} ({made[name].wing}) imports {each} ({made[each].wing})"
        for name, imported in arrows.items()
        for each in imported
        if made[each].wing != made[name].wing and made[each].wing not in ALLOWED[made[name].wing]
    ]
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found.append("a circle of imports: " + " -> ".join(error.args[1]))
    return found


def picture(made: Mapping[str, Module]) -> str:
    """Draw which wing imports which, as text: between two wings stands how many imports of modules there are."""
    counted = Counter((module.wing, made[each].wing) for module in made.values() for each in module.imports)
    width = max(map(len, WINGS))
    lines = [f"{'':{width}}  files  lines   imports from:  " + "  ".join(WINGS[:-1])]
    for wing in reversed(WINGS):
        own = [module for module in made.values() if module.wing == wing]
        cells = "  ".join(f"{(other != wing and counted[wing, other]) or '.':>{len(other)}}" for other in WINGS[:-1])
        lines.append(f"{wing:{width}}  {len(own):5}  {sum(module.lines for module in own):5}                  {cells}")
    return "\n".join(line.rstrip() for line in lines)


def figures(made: Mapping[str, Module]) -> str:
    """Say how large the tree is."""
    longest = max(made.values(), key=lambda module: module.lines)
    of_class = max(made.values(), key=lambda module: module.longest_class[1])
    short = sum(module.lines < SHORT for module in made.values())
    return (
        f"{len(made)} files, {sum(module.lines for module in made.values())} lines, {short} files under {SHORT} lines; "
        f"longest file {longest.name} ({longest.lines}), longest class {of_class.longest_class[0]} "
        f"({of_class.longest_class[1]})"
    )


def page(text: str, made: Mapping[str, Module]) -> str:
    """Return the page with its picture made anew."""
    return with_part(text, "wings", f"```text\n{picture(made)}\n```")


def _name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _wing(name: str) -> str:
    package, *rest = name.split(".")
    if package == "server_patches":
        return package
    if not rest:
        return PUBLIC
    return rest[0] if rest[0] in WINGS else WINGS[0]


def _imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            submodules = [f"{node.module}.{each.name}" for each in node.names]
            inner = [each for each in submodules if each in known]
            yield from inner or [node.module]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the picture into docs/architecture.md")
    made = modules()
    if parser.parse_args().write:
        PAGE.write_text(page(PAGE.read_text(), made))
    print(figures(made), picture(made), sep="\n\n")
    if found := faults(made):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
