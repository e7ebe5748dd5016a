"""The run file: every setting, checked at load.

A value has one home. Sections are read by the part that they are named after. Unknown keys are
refused with the nearest known one. A field marked `MUTABLE` may change when a run is resumed; any
other would break exactness, and is refused by name.
"""

from __future__ import annotations

from sightline.config.files import (
    AnyRun,
    RunFile,
    SftFile,
    check_resume,
    get_section_class,
    iter_settings,
)
from sightline.config.inference import InferenceConfig
from sightline.config.load import dump_toml, load_config, load_stored_config, validate_config
from sightline.config.logging import LoggingConfig
from sightline.config.lora import LoraConfig
from sightline.config.section import MUTABLE, ConfigSection
from sightline.config.sections import (
    MIX,
    DataConfig,
    EnvConfig,
    EnvMixEntry,
    EvalConfig,
    FiltersConfig,
    MediaConfig,
    ModelConfig,
    OrchestratorConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
)
from sightline.config.trainer import TrainerConfig

__all__ = [
    "AnyRun",
    "DataConfig",
    "EnvConfig",
    "EnvMixEntry",
    "EvalConfig",
    "MUTABLE",
    "FiltersConfig",
    "InferenceConfig",
    "LoraConfig",
    "MIX",
    "MediaConfig",
    "ModelConfig",
    "LoggingConfig",
    "OrchestratorConfig",
    "RolloutConfig",
    "RunConfig",
    "RunFile",
    "ConfigSection",
    "SftConfig",
    "SftFile",
    "TrainerConfig",
    "validate_config",
    "check_resume",
    "dump_toml",
    "load_config",
    "load_stored_config",
    "get_section_class",
    "iter_settings",
]
