"""The run file: every setting, checked at load.

A value has one home. Sections are read by the part that they are named after. Unknown keys are
refused with the nearest known one. A field marked `free` may change when a run is resumed; any
other would break exactness, and is refused by name.
"""

from __future__ import annotations

from sightline.config.files import AnyRun, RunFile, SftFile, check_resume, section_of, settings
from sightline.config.inference import Inference
from sightline.config.load import check, dump, load
from sightline.config.lora import Lora
from sightline.config.section import FREE, Section
from sightline.config.sections import (
    MIX,
    Data,
    Env,
    EnvShare,
    Eval,
    Filters,
    Media,
    Model,
    Orchestrator,
    Rollout,
    Run,
    Sft,
)
from sightline.config.trainer import Trainer

__all__ = [
    "AnyRun",
    "Data",
    "Env",
    "EnvShare",
    "Eval",
    "FREE",
    "Filters",
    "Inference",
    "Lora",
    "MIX",
    "Media",
    "Model",
    "Orchestrator",
    "Rollout",
    "Run",
    "RunFile",
    "Section",
    "Sft",
    "SftFile",
    "Trainer",
    "check",
    "check_resume",
    "dump",
    "load",
    "section_of",
    "settings",
]
