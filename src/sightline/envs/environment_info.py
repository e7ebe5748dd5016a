"""What an environment is, asked of another interpreter by `python -m` and this module's name.

The package of an environment need not be importable where trainer and server run. The launcher
sends `[env]` as JSON and reads one line of JSON back.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import sightline
from sightline.config import EnvConfig
from sightline.envs.mix import build_environment
from sightline.errors import SightlineError, mask_output


@dataclass(frozen=True)
class EnvironmentInfo:
    name: str
    shows_media: bool


def get_environment_info(env: EnvConfig) -> EnvironmentInfo:
    environment = build_environment(env)
    return EnvironmentInfo(environment.name, environment.shows_media)


def main() -> None:
    mask_output()
    try:
        found = asdict(get_environment_info(EnvConfig.model_validate_json(sys.stdin.read())))
    except SightlineError as error:
        found = {"problem": error.problem, "fix": error.fix}
    # The last line: what user code prints while it is built comes before.
    print("\n" + json.dumps({**found, "version": sightline.__version__}))


if __name__ == "__main__":
    main()
