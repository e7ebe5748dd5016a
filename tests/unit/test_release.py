"""tools/release.py refuses what should not be released."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
assert SPEC and SPEC.loader
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that can be released."""
    (tmp_path / "src" / "sightline").mkdir(parents=True)
    (tmp_path / "src" / "sightline" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3\n\n- New.\n")
    (tmp_path / ".gitignore").write_text("dist/\n")
    build(tmp_path, release.DASHBOARD)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True)
    return tmp_path


def build(root: Path, member: str) -> None:
    (root / "dist").mkdir(exist_ok=True)
    with zipfile.ZipFile(root / "dist" / "sightline_rl-1.2.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, "")
    with tarfile.open(root / "dist" / "sightline_rl-1.2.3.tar.gz", "w:gz") as sdist:
        sdist.addfile(tarfile.TarInfo(f"sightline_rl-1.2.3/src/{member}"), io.BytesIO())


def test_clean_checkout_with_archives_can_be_released(checkout: Path) -> None:
    assert release.find_problems(checkout) == []


def test_release_problems_are_named(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    (checkout / "CHANGELOG.md").write_text("## Unreleased\n\n- Not sorted yet.\n")
    subprocess.run(["git", "tag", "v1.2.3"], cwd=checkout, check=True)
    build(checkout, "sightline/__init__.py")
    problems = "\n".join(release.find_problems(checkout))
    assert "not clean" in problems and "new.py" in problems
    assert "v1.2.3 is tagged already" in problems
    assert "no entry 1.2.3" in problems and "changes under Unreleased" in problems
    assert problems.count("has no dashboard") == 2


def test_archives_of_another_version_are_refused(checkout: Path) -> None:
    (checkout / "src" / "sightline" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    problems = "\n".join(release.find_problems(checkout))
    assert "dist/ lacks sightline_rl-1.3.0-py3-none-any.whl, sightline_rl-1.3.0.tar.gz" in problems
