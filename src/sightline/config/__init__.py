"""Settings of a run file, validated when it is loaded.

Each setting is defined once, in the section of the component that it configures. A component that
needs another's setting receives that section and keeps no copy. For an unknown key, the error
suggests the nearest known one. Only settings of type `Mutable` may change when a run resumes.
"""

from sightline.config.algorithm_section import AlgorithmConfig as AlgorithmConfig
from sightline.config.files import AnyRun as AnyRun
from sightline.config.files import RunFile as RunFile
from sightline.config.files import SftFile as SftFile
from sightline.config.files import check_resume as check_resume
from sightline.config.files import iter_settings as iter_settings
from sightline.config.files import resolve_paths as resolve_paths
from sightline.config.load import dump_checked_toml as dump_checked_toml
from sightline.config.load import dump_toml as dump_toml
from sightline.config.load import load_config as load_config
from sightline.config.load import validate_config as validate_config
from sightline.config.process_sections import InferenceConfig as InferenceConfig
from sightline.config.section import get_section_class as get_section_class
from sightline.config.sections import DataConfig as DataConfig
from sightline.config.sections import EnvConfig as EnvConfig
from sightline.config.sections import FiltersConfig as FiltersConfig
from sightline.config.sections import LoggingConfig as LoggingConfig
from sightline.config.sections import LoraConfig as LoraConfig
from sightline.config.sections import MediaConfig as MediaConfig
from sightline.config.sections import ModelConfig as ModelConfig
from sightline.config.sections import TrainerConfig as TrainerConfig
