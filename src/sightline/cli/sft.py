"""`sightline sft`: supervised training.

Trains on conversations, of a file or of an environment. Overrides are written section.key=value.
"""

from __future__ import annotations

import argparse

from sightline.cli import training

add_arguments = training.add_arguments


def run(args: argparse.Namespace) -> int:
    from sightline.launch.sft import SftJob

    return training.run_training(SftJob(), args)
