"""The pages of docs/ name files, settings and anchors that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sightline import config
from sightline.config.renamed import RENAMED

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "sightline"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
NAMES = [page.name for page in PAGES]
KEYS = {
    (section, name)
    for kind in (config.RunFile, config.SftFile)
    for section, name, _ in config.iter_settings(kind)
}


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/.<:])((?:[\w.]+/)+\w+\.(?:py|toml|md))\b", page.read_text())
    roots = (ROOT, SRC, page.parent)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_that_are_named_exist(page: Path) -> None:
    text = " ".join(page.read_text().split())
    sections = {section for section, _ in KEYS}
    named = set(re.findall(r"`\[(\w+)\] (\w+)\b", text))
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
        for section, values in tomllib.loads(block).items():
            named |= {(section, key) for key in values}
    assert [(s, key) for s, key in sorted(named - KEYS) if s in sections] == []
    old = {was.split(".")[1] for was, now in RENAMED.items() if was.split(".")[1] not in now}
    assert [key for key in old if "_" in key and re.search(rf"`{key}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_distribution_and_its_extras_exist(page: Path) -> None:
    text = page.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not re.search(r"pip install [^`\n]*\bsightline(?!-rl)|\bsightline\[", text)
    named = re.findall(rf"{project['name']}\[([\w,]+)\]", text)
    extras = {extra for group in named for extra in group.split(",")}
    assert sorted(extras - set(project["optional-dependencies"])) == []


@pytest.mark.parametrize("title", ["An image, from", "A sampled token, from"])
def test_a_walk_names_each_file_once(title: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (walk,) = re.findall(rf"^## {title}.*?(?=^## |\Z)", page, re.M | re.S)
    files = re.findall(r"^\d+\. `([\w/]+\.py)`: ", walk, re.M)
    assert len(files) > 20 and len(files) == len(set(files))
    assert len(re.findall(r"[\w/]+\.py\b", walk)) == len(files), "every file in its own line"
    assert [file for file in files if not (SRC / file).is_file()] == []


def test_the_changelog_has_every_renamed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = [f"| `{spell(was)}` | `{spell(now)}` |" for was, now in RENAMED.items()]
    assert [row for row in rows if row not in text] == []


def spell(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"[{section}] {name}"
