"""Describe an environment from another interpreter: `python -m sightline.envs.environment_info`.

The trainer and the servers need not be able to import the environment's package. The launcher sends
`[env]` as JSON and reads back one line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import sightline
from sightline.config import EnvConfig
from sightline.envs.protocol import build_environment
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
        answer = asdict(get_environment_info(EnvConfig.model_validate_json(sys.stdin.read())))
    except SightlineError as error:
        answer = {"problem": error.problem, "fix": error.fix}
    # Print on the last line, because user code may print while the environment is built.
    print("\n" + json.dumps({**answer, "version": sightline.__version__}))


if __name__ == "__main__":
    main()
