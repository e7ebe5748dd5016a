"""Find the family of a checkpoint, without naming any family.

A family is a folder in this package or in the namespace package `sightline_families`, which any
folder on the Python path can extend. Its `__init__.py` imports neither torch nor transformers, and
defines

    claims(config)                          whether the family handles this config.json
    load_family(path, overrides)            its `Family`
    load_renderer(path, family, resolver)   its `Renderer`
    IS_DEFAULT = True                       optional: commands use it when no family is given
    IS_FALLBACK = True                      optional: tried only if no other family claims a
                                            checkpoint
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sightline.errors import ConfigError, FamilyError, NotRegularFile, SightlineError
from sightline.families.checkpoint_files import read_json, resolve_checkpoint
from sightline.families.protocol import EXACT_PACKING, Family, Forward, ServingSpec
from sightline.families.rope import find_position_limit
from sightline.media import ImageIngestor, MediaStore
from sightline.message import ImageResolver
from sightline.render import Renderer

if TYPE_CHECKING:
    import torch

    from sightline.config import TrainerConfig


FAMILY_PACKAGES = (__name__.rpartition(".")[0], "sightline_families")
"""The packages that contain families: ours, and the namespace package for plugins."""


def _find_modules() -> dict[str, str]:
    """Return the module name of every family, by family name."""
    modules: dict[str, str] = {}
    for place in FAMILY_PACKAGES:
        spec = importlib.util.find_spec(place)
        folders = (spec.submodule_search_locations if spec else None) or ()
        for name in (module.name for module in pkgutil.iter_modules(folders) if module.ispkg):
            if name in modules:
                fix = "rename one of the folders: items and fingerprints contain the name"
                raise FamilyError(f"{place}.{name} and {modules[name]} have the same name", fix)
            modules[name] = f"{place}.{name}"
    return dict(sorted(modules.items()))


def _import_folders() -> dict[str, ModuleType]:
    return {name: importlib.import_module(module) for name, module in _find_modules().items()}


def family_names() -> list[str]:
    return list(_find_modules())


def get_default_family() -> str:
    """Return the family that commands use when none is given."""
    folders = _import_folders()
    chosen = [name for name, folder in folders.items() if getattr(folder, "IS_DEFAULT", False)]
    return [*chosen, *folders][0]


def _import_family_file(name: str, file: str) -> ModuleType:
    return importlib.import_module(f"{_find_modules()[name]}.{file}")


def _has_family_file(name: str, file: str) -> bool:
    return importlib.util.find_spec(f"{_find_modules()[name]}.{file}") is not None


def _get_folder(path: Path) -> ModuleType:
    config = read_config(path)
    claimed = {name: folder for name, folder in _import_folders().items() if folder.claims(config)}
    native = {n: f for n, f in claimed.items() if not getattr(f, "IS_FALLBACK", False)}
    claimed = native or claimed
    kind = f"{path} is a {config.get('model_type')!r} checkpoint"
    if not claimed:
        classes = ", ".join(config.get("architectures") or ()) or "none"
        raise FamilyError(
            f"{kind}, which no family supports: its config.json has no vision_config, which "
            f"describes a vision tower, and its `architectures` ({classes}) name no text-only "
            "model (`...ForCausalLM`)",
            "use a model listed in docs/models.md, or add a family for it "
            "(docs/internals/adding_a_family.md)",
        )
    if len(claimed) > 1:
        problem = f"{kind}, and several families claim it: {', '.join(claimed)}"
        raise FamilyError(problem, "remove all but one of them from the Python path")
    return next(iter(claimed.values()))


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        fix = "create one with `sightline model tiny DIR`, or pass a checkpoint's folder"
        raise FamilyError(f"{path} is not a checkpoint: it has no config.json", fix)
    # transformers also opens files, which it finds in the folder and in its folders.
    for found in (*path.glob("*"), *path.glob("*/*")):
        if found.exists() and not (found.is_file() or found.is_dir()):
            raise NotRegularFile.at(found)
    return read_json(file)


@contextmanager
def _refuse_broken(path: Path) -> Iterator[None]:
    """Turn an error that a wrong value in a checkpoint's files causes into a FamilyError."""
    try:
        yield
    except SightlineError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"{path} cannot be loaded: {type(error).__name__}: {error}"
        fix = "copy config.json and preprocessor_config.json again from the checkpoint"
        raise FamilyError(problem, fix) from error


def load_family(model: str | Path, exact: bool = False, /, **overrides: int) -> Family:
    """Load the family of a checkpoint, which is a folder or a Hub id.

    `overrides` replace its pixel limits. With `exact`, the family does not pack trees, and models
    that cannot be exact are refused.
    """
    path = resolve_checkpoint(model)
    with _refuse_broken(path):
        family = cast(Family, _get_folder(path).load_family(path, overrides))
        family.position_limit = find_position_limit(read_config(path))
    if exact and family.model_class and family.shows_media:
        problem = f"[model] exact is not supported for images in the generic family {family.name!r}"
        fix = "choose a checkpoint with a native family (docs/models.md), or remove exact"
        raise ConfigError(problem, fix)
    if exact and family.packing.carries_state:
        problem = f"[model] exact is not supported for this model: {family.packing.reason}"
        raise ConfigError(problem, "choose a model without recurrent layers, or remove exact")
    if exact and family.packing.kind == "tree":
        family.packing = EXACT_PACKING
    return family


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in config.json of the number of experts per layer."""


def check_parallel(family: Family, model: str | Path, trainer: TrainerConfig, exact: bool) -> None:
    """Raise if the trainer's ranks cannot divide the model as `[trainer]` says."""
    if trainer.context_parallel > 1:
        check_context_parallel(family, model, trainer.context_parallel, exact)
    if trainer.expert_parallel > 1:
        check_expert_parallel(family, model, trainer.expert_parallel)
    if trainer.tensor_parallel > 1:
        check_tensor_parallel(family, model, trainer.tensor_parallel)


def check_context_parallel(family: Family, model: str | Path, size: int, exact: bool) -> None:
    """Raise if `size` ranks cannot divide the tokens of a micro-batch."""
    _check_heads("context_parallel", model, size)
    if family.packing.carries_state or family.packing.kind == "rows":
        reason = f"every rank would need whole sequences: {family.packing.reason}"
        _refuse("context_parallel", size, reason)
    if exact:
        _refuse("context_parallel", size, "[model] exact computes whole sequences")


def check_expert_parallel(family: Family, model: str | Path, size: int) -> None:
    """Raise if `size` ranks cannot divide the experts of each layer."""
    text = _read_text_config(model)
    experts = max(text.get(name) or 0 for name in NUM_EXPERTS)
    if not experts:
        _refuse("expert_parallel", size, "the model has no experts (in config.json)")
    if experts % size:
        reason = f"the model's {experts} experts (in config.json) are not a multiple of it"
        _refuse("expert_parallel", size, reason)
    if family.model_class:
        reason = f"it is untested with the generic family {family.name!r}"
        _refuse("expert_parallel", size, reason)


def check_tensor_parallel(family: Family, model: str | Path, size: int) -> None:
    """Raise if `size` ranks cannot divide the matrices of attention and MLPs."""
    if not family.tensor_plan:
        reason = f"the family {family.name!r} does not say how to divide this model"
        _refuse("tensor_parallel", size, reason)
    _check_heads("tensor_parallel", model, size)


def _check_heads(setting: str, model: str | Path, size: int) -> None:
    text = _read_text_config(model)
    heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 0)
    if not heads or heads % size:
        reason = f"the model's {heads} key-value heads (in config.json) are not a multiple of it"
        _refuse(setting, size, reason)


def _read_text_config(model: str | Path) -> dict[str, Any]:
    config = read_config(resolve_checkpoint(model))
    return config.get("text_config") or config


def _refuse(setting: str, size: int, reason: str) -> None:
    """Raise for a setting that does not work, if `size` ranks divide anything."""
    if size > 1:
        problem = f"[trainer] {setting} = {size} does not work, because {reason}"
        raise ConfigError(problem, f"set [trainer] {setting} = 1")


def load_renderer(
    model: str | Path,
    store: MediaStore,
    family: Family | None = None,
    resolver: ImageResolver | None = None,
    max_model_len: int = 0,
) -> Renderer:
    """Load the renderer of a checkpoint, which puts images into `store`.

    `family` defaults to the checkpoint's own. `resolver` decides which image sources are allowed.
    By default, these are data: and media: URLs. A prompt that cannot fit into `max_model_len`
    tokens is refused before it is tokenized. 0 means no limit.
    """
    path = resolve_checkpoint(model)
    folder = _get_folder(path)
    with _refuse_broken(path):
        family = family or folder.load_family(path, {})
        renderer: Renderer = folder.load_renderer(path, family, resolver or ImageIngestor(store))
    renderer.max_model_len = max_model_len
    return renderer


def load_forward(
    model: str | Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> Forward:
    """Load the model. `attention` is a name in transformers' attention registry."""
    load = _import_family_file(family.name, "forward").load
    path = resolve_checkpoint(model, True)
    with _refuse_broken(path):
        return cast(Forward, load(path, family, device, dtype, attention))


def load_serving(model: str | Path, family: Family, takes_updates: bool = True) -> ServingSpec:
    """Return the checkpoint's vLLM settings. Raise FamilyError if vLLM cannot serve it."""
    if not _has_family_file(family.name, "serving"):
        raise FamilyError(
            f"the family {family.name!r} cannot be served with vLLM: it has no serving.py",
            'set [inference] engine = "torch", or add the file (docs/internals/adding_a_family.md)',
        )
    if family.position_limit:
        how = "scales the rotary frequencies of this checkpoint differently than transformers"
        raise FamilyError(f"{model}: vLLM {how}", 'set [inference] engine = "torch"')
    serving = cast(ServingSpec, _import_family_file(family.name, "serving").Serving())
    serving.check_servable(resolve_checkpoint(model), takes_updates)
    return serving


def write_tiny(name: str, path: Path, seed: int = 0, **options: Any) -> None:
    """Write the small random checkpoint of family `name`. Use the family's tiny.py if it exists."""
    if name not in family_names():
        raise FamilyError(f"{name!r} is no family", f"choose one of {', '.join(family_names())}")
    if _has_family_file(name, "tiny"):
        write = _import_family_file(name, "tiny").write
    else:
        from sightline.families.tiny_checkpoint import write_tiny_checkpoint

        [folder] = _import_folders()[name].__path__
        write = partial(write_tiny_checkpoint, Path(folder))
    write(path, seed=seed, **options)
