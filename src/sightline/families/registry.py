"""Finds the family of a checkpoint. It looks at folders and names none.

A family is a folder of this package, or of `sightline_families`: a namespace that every folder on
the Python path can add to. Its `__init__.py`, which imports neither torch nor transformers, offers

    claims(config)                          whether a checkpoint with this config.json is its own
    load_family(path, overrides)            its `Family`
    load_renderer(path, family, resolver)   its `Renderer`; with `number_images` as a keyword where
                                            it has CAN_NUMBER_IMAGES = True
    IS_DEFAULT = True                       where commands that are given no family take it
    IS_FALLBACK = True                      where it is asked only if no other claims a checkpoint
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sightline.errors import ConfigError, FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.hub import resolve_checkpoint
from sightline.families.protocol import EXACT_PACKING, Family, Forward, ServingSpec
from sightline.media import ImageIngestor, MediaStore
from sightline.message import ImageResolver
from sightline.render import Renderer

if TYPE_CHECKING:
    import torch


FAMILY_PACKAGES = (__name__.rpartition(".")[0], "sightline_families")
"""The packages whose folders are families: our own, and the one of others."""


def _find_modules() -> dict[str, str]:
    """The module of every family, by the family's name."""
    found: dict[str, str] = {}
    for place in FAMILY_PACKAGES:
        spec = importlib.util.find_spec(place)
        folders = (spec.submodule_search_locations if spec else None) or ()
        for name in (module.name for module in pkgutil.iter_modules(folders) if module.ispkg):
            if name in found:
                raise FamilyError(
                    f"{place}.{name} has the name of {found[name]}",
                    "rename its folder: items and fingerprints name a family by it",
                )
            found[name] = f"{place}.{name}"
    return dict(sorted(found.items()))


def _import_folders() -> dict[str, ModuleType]:
    return {name: importlib.import_module(module) for name, module in _find_modules().items()}


def family_names() -> list[str]:
    return list(_find_modules())


def get_default_family() -> str:
    """The family that commands take when none is named: the folder that says so of itself."""
    folders = _import_folders()
    chosen = [name for name, folder in folders.items() if getattr(folder, "IS_DEFAULT", False)]
    return [*chosen, *folders][0]


def _import_family_file(name: str, file: str) -> ModuleType:
    """A file of a family that is loaded only where it is needed."""
    return importlib.import_module(f"{_find_modules()[name]}.{file}")


def _get_folder(path: Path) -> ModuleType:
    config = read_config(path)
    claimed = {name: folder for name, folder in _import_folders().items() if folder.claims(config)}
    native = {n: f for n, f in claimed.items() if not getattr(f, "IS_FALLBACK", False)}
    claimed = native or claimed
    kind = f"{path} is a {config.get('model_type')!r} checkpoint"
    if not claimed:
        raise FamilyError(
            f"{kind}, which no family here knows",
            "docs/models.md lists what loads: of models that see any whose config.json has a "
            "vision_config, of those of text alone few. Use one of these, or add a folder for it: "
            "see docs/adding_a_family.md",
        )
    if len(claimed) > 1:
        raise FamilyError(
            f"{kind}, which several families claim: {', '.join(claimed)}",
            "take the folders of all but one off the Python path",
        )
    return next(iter(claimed.values()))


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise FamilyError(
            f"{path} is no checkpoint: it has no config.json",
            "make one with `sightline model tiny DIR`, or point [model] path at a checkpoint",
        )
    return read_json(file)


def load_family(model: str | Path, exact: bool = False, /, **overrides: int) -> Family:
    """The family of a checkpoint (a folder or an id of the hub); `overrides` win over its own.
    Where arithmetic is `exact` it packs no trees, and is refused where it cannot be."""
    path = resolve_checkpoint(model)
    family = cast(Family, _get_folder(path).load_family(path, overrides))
    if exact and family.found:
        raise ConfigError(
            f"[model] exact = true, and the family {family.name} knows its layers by trying alone",
            "choose a checkpoint of another family, or remove exact",
        )
    if exact and family.packing.carries_state:
        raise ConfigError(
            f"[model] exact = true, and {family.packing.reason}",
            "choose a model that attends in every layer, or remove exact",
        )
    if exact and family.packing.kind == "tree":
        family.packing = EXACT_PACKING
    return family


def load_renderer(
    model: str | Path,
    store: MediaStore,
    family: Family | None = None,
    resolver: ImageResolver | None = None,
    number_images: bool = False,
    max_model_len: int = 0,
) -> Renderer:
    """The renderer of a checkpoint folder; it puts images into `store`.

    `family` is the checkpoint's own where it is left out. `resolver` says which sources of images
    are allowed; without one, data: and media: urls only. `number_images` writes a number before
    every image, where the chat format has a way to. A prompt that cannot fit into `max_model_len`
    tokens is refused before it is tokenized; 0 is any length.
    """
    path = resolve_checkpoint(model)
    folder = _get_folder(path)
    if number_images and not getattr(folder, "CAN_NUMBER_IMAGES", False):
        raise FamilyError(
            f"the chat format of {path} does not number images",
            "remove [model] number_images from the run file",
        )
    family = family or folder.load_family(path, {})
    options = {"number_images": True} if number_images else {}
    made = folder.load_renderer(path, family, resolver or ImageIngestor(store), **options)
    renderer = cast(Renderer, made)
    renderer.max_model_len = max_model_len
    return renderer


def load_forward(
    model: str | Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> Forward:
    """The model itself, with torch; `attention` is a name that transformers' registry knows."""
    load = _import_family_file(family.name, "forward").load
    return cast(Forward, load(resolve_checkpoint(model, True), family, device, dtype, attention))


def load_serving(model: str | Path, family: Family, takes_updates: bool = True) -> ServingSpec:
    """How an engine that is not ours names the family's things, if it can serve the checkpoint."""
    try:
        serving = cast(ServingSpec, _import_family_file(family.name, "serving").Serving())
    except ModuleNotFoundError as error:
        if error.name != f"{_find_modules()[family.name]}.serving":
            raise  # the file is there, and what it imports is not
        raise FamilyError(
            f"the family {family.name} does not say how vLLM names its images",
            'set engine = "torch", or add serving.py to its folder: see docs/adding_a_family.md',
        ) from error
    serving.check_servable(resolve_checkpoint(model), takes_updates)
    return serving


def write_tiny(name: str, path: Path, seed: int, **options: Any) -> None:
    """Writes the small random checkpoint of family `name`."""
    if name not in family_names():
        raise FamilyError(f"no family {name!r}", f"choose one of {', '.join(family_names())}")
    _import_family_file(name, "tiny").write(path, seed=seed, **options)
