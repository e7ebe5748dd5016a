"""The settings of a run file, checked at load.

Each setting has one place, in the section of the component that it configures. A component that
needs another's setting receives that section and keeps no copy. Unknown keys are refused with the
nearest known one. A setting of type `Mutable` may change when a run resumes; a change of any other
is refused by name.
"""

from sightline.config.files import (
    AnyRun,
    RunFile,
    SftFile,
    check_resume,
    iter_settings,
    resolve_paths,
)
from sightline.config.load import (
    dump_checked_toml,
    dump_toml,
    load_config,
    load_stored_config,
    validate_config,
)
from sightline.config.process_sections import InferenceConfig
from sightline.config.section import get_section_class
from sightline.config.sections import (
    AlgorithmConfig,
    DataConfig,
    EnvConfig,
    FiltersConfig,
    LoggingConfig,
    LoraConfig,
    MediaConfig,
    ModelConfig,
    RolloutConfig,
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
    "RolloutConfig",
    "RunFile",
    "SftFile",
    "TrainerConfig",
    "check_resume",
    "dump_checked_toml",
    "dump_toml",
    "get_section_class",
    "iter_settings",
    "load_config",
    "load_stored_config",
    "resolve_paths",
    "validate_config",
]
