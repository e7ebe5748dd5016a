"""`sightline sft`: train with supervised fine-tuning.

Trains on conversations from a dataset or an environment. Append settings as section.key=value.
"""

from __future__ import annotations

import argparse

from sightline.cli import training

add_arguments = training.add_arguments


def run(args: argparse.Namespace) -> int:
    from sightline.launch.jobs import SftJob

    return training.run_training(SftJob(), args)
