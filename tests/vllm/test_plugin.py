"""The plugin's parts in isolation. One process of vLLM's interpreter runs `plugin_checks.py`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import vllm_servers

CHECKS = Path(__file__).parent / "plugin_checks.py"


@pytest.fixture(scope="session")
def found(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the error of each check."""
    done = subprocess.run(
        [python, str(CHECKS), str(tmp_path_factory.mktemp("checks"))],
        capture_output=True, text=True, timeout=vllm_servers.scale_s(300), check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("name", re.findall(r"^def (check_\w+)", CHECKS.read_text(), re.MULTILINE))
def test_plugin_check_passes(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]
