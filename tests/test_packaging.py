"""Package contents: dependencies, tested versions, licence."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sightline
from sightline.cli.main import EXTRA_OF_PACKAGE

ROOT = Path(__file__).resolve().parents[1]
NAME = "sightline-rl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in lines]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parts = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(parts) == len([line for line in lines if not line.startswith("#")])
    return parts


def test_no_dependency_is_a_path_or_an_address() -> None:
    assert [str(requirement) for requirement in requirements() if requirement.url] == []


def test_every_dependency_of_the_package_has_an_upper_bound() -> None:
    open_ended = [line for line in PROJECT["dependencies"] if "<" not in line]
    assert open_ended == []


def test_tested_versions_are_canonical() -> None:
    for name, version in constraints().items():
        assert name == canonicalize_name(name)
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)*(b[0-9]+|\.post[0-9]+)?", version), name


def test_the_lock_file_pins_a_training_installation_with_hashes() -> None:
    """`make lock` writes it."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked: dict[str, str] = {}
    hashes: dict[str, int] = {}
    for line in lines:
        if "--hash=sha256:" in line:
            hashes[name] += 1  # noqa: F821
            continue
        name, _, version = line.split(" ")[0].partition("==")
        locked[name], hashes[name] = version, 0
    assert [name for name, num in hashes.items() if not num] == []
    versions = constraints()
    assert {n: v for n, v in locked.items() if versions.get(n, v) != v} == {}
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in (*PROJECT["dependencies"], *extras["train"])]
    names = {canonicalize_name(pinned.name) for pinned in wanted} - {NAME}
    assert names - locked.keys() == set()


def test_the_tested_versions_fit_the_ranges() -> None:
    versions = constraints()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name != NAME:
            assert requirement.specifier.contains(versions[name]), (
                f"{requirement} but {versions[name]}"
            )


def test_install_commands_name_sightline_rl() -> None:
    """`sightline` on PyPI is another project's package."""
    assert PROJECT["name"] == NAME
    stranger = re.compile(r"(pip install[^\n]*['\" ]sightline(?!-rl)\b|\bsightline\[\w)")
    breaches, extras = [], set()
    for path in shipped_texts():
        text = path.read_text()
        breaches += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in stranger.finditer(text)]
        extras |= {
            name for hit in re.findall(rf"{NAME}\[([\w,]+)\]", text) for name in hit.split(",")
        }
    assert breaches == []
    named = extras | set(EXTRA_OF_PACKAGE.values())
    assert sorted(named - set(PROJECT["optional-dependencies"])) == []


def shipped_texts() -> Iterator[Path]:
    """Every file of the checkout in which somebody could read what to install."""
    suffixes = {".py", ".md", ".toml", ".ipynb", ".yml", ".yaml", ".cff"}
    for path in [ROOT / "Makefile", *ROOT.iterdir()]:
        if path.is_file() and (path.suffix in suffixes or path.name == "Makefile"):
            yield path
    for folder in ("src", "docs", "examples", "tests", "tools", ".github", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes and path != Path(__file__).resolve():
                yield path


def test_base_package_requires_neither_torch_nor_transformers() -> None:
    base = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert base.isdisjoint({"torch", "transformers", "safetensors", "fastapi", "pyarrow"})


def test_makefile_help_lists_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony
    targets = [name for name in phony[1].split() if name != "$(VENV)"]
    silent = [name for name in targets if not re.search(rf"^{name}:.*## \w", makefile, re.M)]
    assert silent == []


def test_ci_runs_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    stages = re.search(r"^stages=\((.*?)\)$", (ROOT / ".ci" / "run").read_text(), re.M | re.S)
    assert stages
    assert {"check", "test-bare", "test-wheel"} <= set(stages[1].split())
    assert [name for name in stages[1].split() if f"\n{name}:" not in makefile] == []


def test_the_citation_names_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {sightline.__version__}\n" in citation


def test_workflow_runs_the_same_targets_as_ci() -> None:
    stages = re.search(r"^stages=\((.*?)\)$", (ROOT / ".ci" / "run").read_text(), re.M | re.S)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    targets = [
        part for group in re.findall(r"target: \[(.*)\]", workflow) for part in group.split(", ")
    ]
    targets += re.findall(r"make ([a-z-]+)$", workflow, re.M)
    assert stages
    # A bare Debian tree is built by debootstrap, as root: the workflow runs its tests alone.
    wanted = {"test" if name == "test-bare" else name for name in stages[1].split()}
    assert set(targets) == wanted
