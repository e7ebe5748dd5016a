"""Families that each break one promise: copies of the third family, and of what
it builds on, with a few words changed.

`broken_families/` holds them, a file for each suite. This is a plugin of pytest too: it leaves, of
each broken family, the tests that must fail on it.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from editing import Edit
from hypothesis import Phase, settings
from shards import take_first

from tests.contract.case import Case
from tests.contract.suites import ROOT, THIRD_FAMILY

SHARED = {
    "sightline.families.renderer": "base_renderer",
    "sightline.families.format_description": "base_description",
    "sightline.families.protocol": "base_protocol",
    "sightline.families.vision_family": "base_vision",
    "sightline.families.processor_settings": "base_settings",
    "sightline.render.bridge": "base_bridge",
}
"""Modules that a family builds on. Each broken family has copies, which can be broken too."""
HERE = Path(__file__).with_name("broken_families")
FAMILY = "pebble"
NUM_PER_SUITE = 3
"""Broken families of each suite that CI tries."""

# The first failure is enough, and it is always the same.
settings.register_profile(
    "broken",
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    database=None,
    deadline=None,
)


@dataclass(frozen=True)
class Broken:
    name: str
    fails: tuple[str, ...]
    """The tests that say what is broken."""
    edits: tuple[Edit, ...]

    def write(self, home: Path) -> None:
        """The family in folder `home`, under its own name, with its cases."""
        folder = home / "sightline_families" / self.name
        shutil.copytree(
            THIRD_FAMILY / "sightline_families" / FAMILY,
            folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for module, name in SHARED.items():
            source = ROOT.joinpath("src", *module.split(".")).with_suffix(".py")
            shutil.copy(source, folder / f"{name}.py")
        for file in folder.glob("*.py"):
            source = file.read_text()
            for module, name in SHARED.items():
                source = source.replace(f"from {module} import", f"from .{name} import")
            file.write_text(source)
        for edit in self.edits:
            edit.apply(folder)
        for file in THIRD_FAMILY.glob(f"{FAMILY}_*"):
            shutil.copy(file, home / file.name.replace(FAMILY, self.name))
        for copied in (*folder.iterdir(), *home.glob(f"{self.name}_*")):
            copied.write_text(copied.read_text().replace(FAMILY, self.name))


def read_broken() -> tuple[Broken, ...]:
    return tuple(
        _broken(name, **entry)
        for file in sorted(HERE.glob("*.toml"))
        for name, entry in take_first([*tomllib.loads(file.read_text()).items()], NUM_PER_SUITE)
    )


def _broken(
    name: str, fails: list[str], also: list[dict[str, str]] | None = None, **edit: str
) -> Broken:
    edits = tuple(Edit(**one) for one in (edit, *(also or ())))
    return Broken(f"{FAMILY}_{name}", tuple(fails), edits)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    fails = {broken_case.name: broken_case.fails for broken_case in read_broken()}
    items[:] = [item for item in items if item.originalname in fails[_case_of(item)]]


def _case_of(item: Any) -> str:
    return next(p.name for p in item.callspec.params.values() if isinstance(p, Case))
