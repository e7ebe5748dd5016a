"""`sightline sft`: train with supervised fine-tuning.

Train on conversations from a dataset or an environment. Append settings as section.key=value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.cli import training
from sightline.config import SftFile

add_arguments = training.add_arguments


def run(args: argparse.Namespace) -> int:
    runs = []
    if not args.resume:
        runs = training.expand_sweep(SftFile, Path(args.file or ""), args.overrides)
    # Imported after the settings are valid, because it loads torch and takes seconds.
    from sightline.launch.jobs import SftJob

    return training.run_training(SftJob(), args, runs)
