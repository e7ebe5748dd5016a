"""Workers in another virtual environment: its interpreter is asked before anything starts."""

from __future__ import annotations

import json
import subprocess

import sightline
from sightline.config import EnvConfig
from sightline.envs.environment_info import EnvironmentInfo, get_environment_info
from sightline.errors import ConfigError
from sightline.launch.processes import build_environ

SETTING = "[rollout] python"
DESCRIBE_TIMEOUT_S = 120.0
"""A cold disk may take a minute to import a large package."""


def describe_environment(
    env: EnvConfig, python: str, version: str = sightline.__version__
) -> EnvironmentInfo:
    """What `[env]` is, to the interpreter that the workers will run in; one that has another
    version of sightline is refused."""
    if not python:
        return get_environment_info(env)
    try:
        done = subprocess.run(
            [python, "-m", "sightline.envs.environment_info"],
            input=env.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=DESCRIBE_TIMEOUT_S,
            env=build_environ(threads=1),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{SETTING} = {python!r} does not run: {error}",
            "name the python of a virtual environment that has sightline-rl and the environment",
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise ConfigError(
            f"{SETTING} = {python!r} cannot build the environment: {words[0]}",
            f"try `{python} -m sightline --version`; workers need sightline and [env]'s package",
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["version"] != version:
        raise ConfigError(
            f"{SETTING} = {python!r} has sightline {found['version']}, and this is {version}",
            "install the same version there: they speak to one another",
        )
    if "problem" in found:
        raise ConfigError(f"{SETTING} = {python!r}: {found['problem']}", found["fix"])
    return EnvironmentInfo(found["name"], found["shows_images"])
