"""Gives the family and renderer suites their checkpoints: those of `cases/`, or of `--cases`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from sightline import MediaStore
from tests.contract.case import Case, Checkpoint
from tests.contract.cases import read_cases

WANTED: dict[str, Callable[[Case], bool]] = {
    "checkpoint": lambda case: case.has_own_format,
    "seeing": lambda case: case.shows_media and case.has_own_format,
    "making_pixels": lambda case: (
        case.shows_media and case.has_own_format and case.makes_pixels_alone
    ),
    "templated": lambda case: case.published_template is not None and case.has_own_format,
    "computing": lambda case: case.has_weights,
    "filming": lambda case: case.shows_videos and case.has_own_format,
    "computing_videos": lambda case: case.shows_videos and case.has_weights,
}
"""Cases of each fixture below."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        metavar="MODULE",
        help="run the family and renderer suites on the CASES of this module, in place of our own",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.config.getoption("--cases", default=None)
    for name in WANTED.keys() & set(metafunc.fixturenames):
        cases = [case for case in read_cases(module) if WANTED[name](case)]
        names = [case.name for case in cases]
        metafunc.parametrize(name, cases, ids=names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Checkpoint]:
    """Load a case once."""

    @cache
    def loaded(case: Case) -> Checkpoint:
        path = tmp_path_factory.mktemp(case.name)
        case.write(path)
        return Checkpoint(case, path, MediaStore(tmp_path_factory.mktemp("media")))

    return loaded


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    return load(request.param)


@pytest.fixture(scope="session")
def seeing(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint that shows images."""
    return load(request.param)


@pytest.fixture(scope="session")
def making_pixels(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint whose family makes pixels without transformers."""
    return load(request.param)


@pytest.fixture(scope="session")
def templated(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint whose published template is available.

    The others have recorded tokens in golden/.
    """
    return load(request.param)


@pytest.fixture(scope="session")
def computing(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint whose weights fit its ids."""
    return load(request.param)


@pytest.fixture(scope="session")
def filming(request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]) -> Checkpoint:
    """A checkpoint that shows videos."""
    return load(request.param)


@pytest.fixture(scope="session")
def computing_videos(
    request: pytest.FixtureRequest, load: Callable[[Case], Checkpoint]
) -> Checkpoint:
    """A checkpoint that shows videos, and whose weights fit its ids."""
    return load(request.param)


@pytest.fixture
def editable(seeing: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the checkpoint's folder that a test may damage."""
    return Path(shutil.copytree(seeing.path, tmp_path / "copy"))
