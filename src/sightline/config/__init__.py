"""Settings of a run file, validated when it is loaded.

Each setting is defined once, in the section of the component that it configures. A component that
needs another's setting receives that section and keeps no copy. For an unknown key, the error
suggests the nearest known one. Only settings of type `Mutable` may change when a run resumes.
"""

from sightline.config.algorithm_section import AlgorithmConfig
from sightline.config.files import (
    AnyRun,
    RunFile,
    SftFile,
    check_resume,
    iter_settings,
    keep_planned,
    resolve_paths,
)
from sightline.config.load import dump_checked_toml, dump_toml, load_config, validate_config
from sightline.config.process_sections import InferenceConfig
from sightline.config.section import get_section_class
from sightline.config.sections import (
    DataConfig,
    EnvConfig,
    FiltersConfig,
    LoggingConfig,
    LoraConfig,
    MediaConfig,
    ModelConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "AnyRun",
    "DataConfig",
    "EnvConfig",
    "FiltersConfig",
    "InferenceConfig",
    "LoggingConfig",
    "LoraConfig",
    "MediaConfig",
    "ModelConfig",
    "RunFile",
    "SftFile",
    "TrainerConfig",
    "check_resume",
    "dump_checked_toml",
    "dump_toml",
    "get_section_class",
    "iter_settings",
    "keep_planned",
    "load_config",
    "resolve_paths",
    "validate_config",
]
