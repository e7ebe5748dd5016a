"""The import graph of the package, read from its source.

`python tests/import_graph.py` rewrites the generated part of docs/architecture.md. The architecture
test fails if that is out of date. Imports inside functions and for type checking count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sightline"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- begin: made by `make docs` -->", "<!-- end -->"

ROWS = (
    ("errors",),
    ("regular_file", "bounded_child"),
    ("config", "media", "transport"),
    ("message", "wire"),
    ("run", "render"),
    ("families", "trace"),
    ("envs", "pixels", "compute"),
    ("algo",),
    ("pack", "rollout"),
    ("inference", "orchestrator", "trainer"),
    ("view",),
    ("launch",),
    ("bench",),
    ("cli",),
)
ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    names: tuple[str, ...]
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(SRC.rglob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = ["sightline", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    package = ["sightline", *path.relative_to(SRC).parts[:-1]]

    def visit(node: ast.AST, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, for_types)
            return
        for module, names in _imported(node, package):
            yield Import(name_of(path), node.lineno, module, names, for_types)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, for_types)

    return tuple(visit(tree_of(path), False))


def _imported(node: ast.AST, package: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        start = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*start, *([node.module] if node.module else [])])
        yield module, tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and _name_called(node) == "import_module":
        first = node.args[0]
        start = first.values[0] if isinstance(first, ast.JoinedStr) else first
        if isinstance(start, ast.Constant) and isinstance(start.value, str):
            yield start.value.rstrip("."), ()


def _name_called(node: ast.Call) -> str:
    """Return the last name of the called function, `c` of `a.b.c()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def rooms_used(modules: Import) -> list[str]:
    """Rooms that an import reaches; '' is the package's own public face."""
    parts = modules.module.split(".")
    if parts[0] != "sightline":
        return []
    if len(parts) > 1:
        return [parts[1]]
    return [name if name in ROW_OF else "" for name in modules.names if name != "__version__"]


@cache
def room_arrows() -> dict[tuple[str, str], int]:
    """How many imports lead from one room to another."""
    arrows: dict[tuple[str, str], int] = {}
    for path in files():
        room = room_of(path)
        if room not in ROW_OF:
            continue
        for imported in imports_of(path):
            for used in rooms_used(imported):
                if used and used != room:
                    arrows[room, used] = arrows.get((room, used), 0) + 1
    return arrows


@cache
def upward_arrows() -> tuple[str, ...]:
    """Imports of a room from its own row or a later one."""
    breaches = []
    for path in files():
        room = room_of(path)
        if room not in ROW_OF:
            continue
        for imported in imports_of(path):
            for used in rooms_used(imported):
                if used != room and (used == "" or ROW_OF[used] >= ROW_OF[room]):
                    breaches.append(str(imported))
    return tuple(breaches)


@cache
def circles() -> tuple[tuple[str, ...], ...]:
    """Return groups of modules that import each other, directly or indirectly.

    Importing a name from a package's `__init__` counts as importing the module that defines it.
    """
    modules = {module_of(path): path for path in files()}
    packages = {module_of(path) for path in files() if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {name: set() for name in modules if name not in packages}
    for name in graph:
        for imported in imports_of(modules[name]):
            targets = [imported.module, *(f"{imported.module}.{part}" for part in imported.names)]
            for target in targets:
                if target in packages:
                    graph[name] |= _shown_by(modules[target], imported.names)
                elif target in graph and target != name:
                    graph[name].add(target)
    edges = [(name, target) for name, targets in graph.items() for target in targets]
    components = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return tuple(tuple(sorted(group)) for group in components if len(group) > 1)


def _shown_by(init: Path, names: tuple[str, ...]) -> set[str]:
    """Return the modules whose names a package's `__init__` exports."""
    return {
        imported.module
        for imported in imports_of(init)
        if set(imported.names) & set(names) and imported.module.startswith("sightline.")
    }


def lines_of(room: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files() if room_of(path) == room)


def purpose_of(room: str) -> str:
    path = SRC / f"{room}.py"
    first = ast.get_docstring(tree_of(path if path.is_file() else SRC / room / "__init__.py")) or ""
    return " ".join(first.split("\n\n")[0].split())


def make_table() -> str:
    """The generated part of docs/architecture.md."""
    lines = ["| row | room | lines | purpose |", "|---|---|---|---|"]
    for number, row in enumerate(ROWS, 1):
        for room in row:
            lines.append(f"| {number} | `{room}` | {lines_of(room):,} | {purpose_of(room)} |")
    total = sum(len(path.read_text().splitlines()) for path in files())
    product = total - lines_of("bench") - lines_of("view")
    lines += [
        "",
        f"{len(ROW_OF)} rooms in {len(ROWS)} rows, {sum(room_arrows().values()):,} imports between "
        f"rooms, {len(upward_arrows())} upward arrows, {len(circles())} cycles; {total:,} lines, "
        f"{product:,} of them outside `bench` and `view`.",
    ]
    return "\n".join(lines)


def make_page(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}\n{END}{after}"


def main() -> None:
    PAGE.write_text(make_page(PAGE.read_text()))


if __name__ == "__main__":
    main()
