"""The run file: every setting, checked at load.

A value has one home, in the section of the part that it belongs to; who needs it elsewhere is given
the section, and holds no copy. Unknown keys are refused with the nearest known one. A setting of
type `Mutable` may change when a run is resumed; any other would break exactness, and is refused by
name.
"""

from __future__ import annotations

from sightline.config.files import AnyRun, RunFile, SftFile, check_resume, iter_settings
from sightline.config.inference import InferenceConfig
from sightline.config.load import dump_toml, load_config, load_stored_config, validate_config
from sightline.config.section import ConfigSection, get_section_class
from sightline.config.sections import (
    DataConfig,
    EnvConfig,
    EnvMixEntry,
    EvalConfig,
    FiltersConfig,
    LoggingConfig,
    LoraConfig,
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
    "FiltersConfig",
    "InferenceConfig",
    "LoraConfig",
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
