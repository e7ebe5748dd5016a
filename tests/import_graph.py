"""The import graph of the package, read from its source: rooms, rows, arrows and circles.

`python tests/import_graph.py` rewrites the generated part of docs/architecture.md and its picture;
the architecture test fails where they are out of date. An import counts wherever it stands, also
inside a function or for type checking alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "sightline"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "charts" / "import_graph.svg"
BEGIN, END = "<!-- begin: made by `make docs` -->", "<!-- end -->"

ROWS = (
    ("errors",),
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
    """The last name of what is called, `c` of `a.b.c()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def rooms_used(found: Import) -> list[str]:
    """Rooms that an import reaches; '' is the package's own public face."""
    parts = found.module.split(".")
    if parts[0] != "sightline":
        return []
    if len(parts) > 1:
        return [parts[1]]
    return [name if name in ROW_OF else "" for name in found.names if name != "__version__"]


@cache
def room_arrows() -> dict[tuple[str, str], int]:
    """How many imports lead from one room to another."""
    arrows: dict[tuple[str, str], int] = {}
    for path in files():
        room = room_of(path)
        if room not in ROW_OF:
            continue
        for found in imports_of(path):
            for used in rooms_used(found):
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
        for found in imports_of(path):
            for used in rooms_used(found):
                if used != room and (used == "" or ROW_OF[used] >= ROW_OF[room]):
                    breaches.append(str(found))
    return tuple(breaches)


@cache
def circles() -> tuple[tuple[str, ...], ...]:
    """Groups of modules that import one another, directly or around corners.

    A package's `__init__` that gathers the names of its modules is left out: importing one of
    these names counts as importing its module.
    """
    modules = {module_of(path): path for path in files()}
    packages = {module_of(path) for path in files() if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {name: set() for name in modules if name not in packages}
    for name in graph:
        for found in imports_of(modules[name]):
            targets = [found.module, *(f"{found.module}.{part}" for part in found.names)]
            for target in targets:
                if target in packages:
                    graph[name] |= _shown_by(modules[target], found.names)
                elif target in graph and target != name:
                    graph[name].add(target)
    return tuple(tuple(sorted(group)) for group in _strong_components(graph) if len(group) > 1)


def _shown_by(init: Path, names: tuple[str, ...]) -> set[str]:
    """The modules whose names a package's `__init__` hands on."""
    return {
        found.module
        for found in imports_of(init)
        if set(found.names) & set(names) and found.module.startswith("sightline.")
    }


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in graph:
                continue
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            groups.append(stack[at:])
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return groups


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


def make_picture() -> str:
    """Rooms as boxes in their rows. An arrow that follows from two others is left out."""
    width, box_w, box_h, gap = 980, 148, 40, 34
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(ROWS):
        y = 16 + number * (box_h + gap)
        step = width / (len(row) + 1)
        for at, room in enumerate(row, 1):
            places[room] = (at * step, y)
    reach = _reachable(set(room_arrows()))
    kept = [
        (a, b)
        for a, b in sorted(room_arrows())
        if not any((a, c) in room_arrows() and b in reach[c] for c in ROW_OF if c not in (a, b))
    ]
    height = 16 + len(ROWS) * (box_h + gap)
    body = []
    for a, b in kept:
        (xa, ya), (xb, yb) = places[a], places[b]
        body.append(
            f'<line x1="{xa:.0f}" y1="{ya:.0f}" x2="{xb:.0f}" y2="{yb + box_h:.0f}" class="arrow" '
            f'marker-end="url(#head)"><title>{a} imports {b}</title></line>'
        )
    for room, (x, y) in places.items():
        body.append(
            f'<rect x="{x - box_w / 2:.0f}" y="{y:.0f}" width="{box_w}" height="{box_h}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 25:.0f}" class="name">{room}</text>'
        )
    style = (
        "rect{fill:#f6f8fa;stroke:#57606a}text{text-anchor:middle;font-family:sans-serif;"
        "fill:#1f2328}.name{font-size:14px;font-weight:600}"
        ".arrow{stroke:#8c959f;stroke-width:1.2}"
        "@media(prefers-color-scheme:dark){rect{fill:#161b22;stroke:#8b949e}text{fill:#e6edf3}"
        ".arrow{stroke:#6e7681}}"
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="#8c959f"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>Which room imports which</title>",
            f"<defs>{head}</defs><style>{style}</style>",
            *body,
            "</svg>",
            "",
        ]
    )


def _reachable(arrows: set[tuple[str, str]]) -> dict[str, set[str]]:
    reach: dict[str, set[str]] = {}
    for row in ROWS:
        for room in row:
            direct = {b for a, b in arrows if a == room}
            reach[room] = direct | {c for b in direct for c in reach.get(b, set())}
    return reach


def make_page(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}\n{END}{after}"


def main() -> None:
    PAGE.write_text(make_page(PAGE.read_text()))
    PICTURE.write_text(make_picture())


if __name__ == "__main__":
    main()
