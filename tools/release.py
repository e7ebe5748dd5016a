"""Checks that a checkout can be released, and tags it: `make release`, `make release DRY=1`.

The version is the one of src/sightline/__init__.py. `make wheel` has built dist/ before this runs.
Nothing is pushed and nothing is uploaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = "sightline/view/dashboard/static/index.html"


def read_version(root: Path) -> str:
    text = (root / "src" / "sightline" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.M)
    return match[1] if match else ""


def find_problems(root: Path) -> list[str]:
    """Return the problems that prevent a release, each with what to do."""
    version = read_version(root)
    problems = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        problems.append(f"version {version!r}: write it as 1.2.3 or 1.2.3rc1")
    if changed := git(root, "status", "--porcelain"):
        problems.append(f"the tree is not clean: commit or remove\n{changed}")
    if git(root, "tag", "--list", f"v{version}"):
        problems.append(f"v{version} is tagged already: raise __version__")
    problems += find_changelog_problems((root / "CHANGELOG.md").read_text(), version)
    return problems + find_archive_problems(root / "dist", version)


def find_changelog_problems(text: str, version: str) -> list[str]:
    sections = dict(re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    problems = []
    if not sections.get(version, "").strip():
        problems.append(f"CHANGELOG.md has no entry {version}: give it a heading and its changes")
    if sections.get("Unreleased", "").strip():
        problems.append(f"CHANGELOG.md has changes under Unreleased: move them to {version}")
    return problems


def find_archive_problems(dist: Path, version: str) -> list[str]:
    wheel = dist / f"sightline_rl-{version}-py3-none-any.whl"
    sdist = dist / f"sightline_rl-{version}.tar.gz"
    missing = [path.name for path in (wheel, sdist) if not path.is_file()]
    if missing:
        return [f"dist/ lacks {', '.join(missing)}: run `make wheel`"]
    with zipfile.ZipFile(wheel) as opened:
        names = {wheel.name: opened.namelist()}
    with tarfile.open(sdist) as opened_sdist:
        names[sdist.name] = opened_sdist.getnames()
    return [
        f"{name} has no dashboard: run `make wheel`"
        for name, members in names.items()
        if not any(member.endswith(DASHBOARD) for member in members)
    ]


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="check, and tag nothing")
    args = parser.parse_args()
    version, problems = read_version(ROOT), find_problems(ROOT)
    for problem in problems:
        print(f"not released: {problem}", file=sys.stderr)
    if problems:
        return 1
    if args.dry_run:
        print(f"{version} can be released")
        return 0
    git(ROOT, "tag", "--annotate", f"v{version}", "--message", f"Sightline {version}")
    print(f"tagged v{version}: `git push origin v{version}`; dist/ holds what to upload")
    return 0


if __name__ == "__main__":
    sys.exit(main())
