"""`sightline init NAME`: create a project folder for your own environment.

The folder contains an example environment with a test, run files for a supervised warm-up and for
reinforcement learning, and a README with the commands. A tiny model learns the task on a CPU.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from sightline.config.sections import RUN_NAME
from sightline.errors import ConfigError, format_command

SUFFIX = ".template"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="NAME", help="folder to create")


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    name = folder.resolve().name
    if not RUN_NAME.fullmatch(f"{name}-warmup"):  # the longer name of its two runs
        fix = "use up to 93 letters (a to z), digits and ._+- and start with a letter or digit"
        raise ConfigError(f"{name!r} is not a valid run name", fix)
    if folder.exists():
        raise ConfigError(f"{folder} already exists", "choose a new folder")
    # The suffix keeps the class apart from imported names and keywords.
    words = (word[:1].upper() + word[1:] for word in re.split(r"[\W_]+", name))
    class_name = re.sub(r"^(?=\d)", "_", f"{''.join(words)}Env")
    folder.mkdir(parents=True)
    for template in files("sightline.cli").joinpath("project").iterdir():
        if template.name.endswith(SUFFIX):
            text = template.read_text().replace("$name", name).replace("$class", class_name)
            (folder / template.name.removesuffix(SUFFIX)).write_text(text)
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    command = format_command("cd", folder)
    print(f"next: {command}, then see README.md; first `sightline try environment:{class_name}`")
    return 0
