"""Finds the family of a checkpoint. It looks at folders and names none.

A family is a folder of this package, or of `sightline_families`: a namespace that every folder on
the Python path can add to.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import sightline.families as families_package
from sightline.errors import FamilyError
from sightline.families.hub import find_checkpoint
from sightline.families.protocol import Family, Forward, Serving
from sightline.media import Ingest, MediaStore
from sightline.message import Door
from sightline.render import Renderer

if TYPE_CHECKING:
    import torch


PLACES = (families_package.__name__, "sightline_families")
"""The packages whose folders are families: our own, and the one of others."""


def _modules() -> dict[str, str]:
    """The module of every family, by the family's name."""
    found: dict[str, str] = {}
    for place in PLACES:
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


def _folders() -> dict[str, ModuleType]:
    return {name: importlib.import_module(module) for name, module in _modules().items()}


def family_names() -> list[str]:
    return list(_modules())


def first_family() -> str:
    """The family that commands take when none is named: the folder that says so of itself."""
    folders = _folders()
    said = [name for name, folder in folders.items() if getattr(folder, "IS_FIRST", False)]
    return [*said, *folders][0]


def _file_of(name: str, file: str) -> ModuleType:
    """A file of a family that is loaded only where it is needed."""
    return importlib.import_module(f"{_modules()[name]}.{file}")


def _folder_of(path: Path) -> ModuleType:
    config = read_config(path)
    claimed = {name: folder for name, folder in _folders().items() if folder.claims(config)}
    kind = f"{path} is a {config.get('model_type')!r} checkpoint"
    if not claimed:
        raise FamilyError(
            f"{kind}, which no family here knows",
            f"use a checkpoint of {', '.join(family_names())}, or add a folder for it: see "
            "docs/adding_a_family.md",
        )
    if len(claimed) > 1:
        raise FamilyError(
            f"{kind}, which several families claim: {', '.join(claimed)}",
            "take the folders of all but one off the Python path",
        )
    return next(iter(claimed.values()))


def find_peer_config(model: Path) -> str | None:
    """What `sightline bench render` compares the family of a checkpoint with."""
    found: str | None = getattr(_folder_of(model), "PEER_CONFIG", None)
    return found


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise FamilyError(
            f"{path} is no checkpoint: it has no config.json",
            "make one with `sightline model tiny DIR`, or point [model] path at a checkpoint",
        )
    return cast(dict[str, Any], json.loads(file.read_text()))


def load_family(model: str | Path, **overrides: int) -> Family:
    """The family of a checkpoint (a folder or an id of the hub); `overrides` win over its own."""
    path = find_checkpoint(model)
    return cast(Family, _folder_of(path).load_family(path, overrides))


def load_renderer(
    model: str | Path,
    store: MediaStore,
    family: Family | None = None,
    door: Door | None = None,
    number_pictures: bool = False,
) -> Renderer:
    """The renderer of a checkpoint folder; it puts images into `store`.

    `family` is the checkpoint's own where it is left out. `door` says which sources of images
    are allowed; without one, data: and media: urls only. `number_pictures` writes a number before
    every image, where the chat format has a way to.
    """
    path = find_checkpoint(model)
    folder = _folder_of(path)
    if family is None:
        family = folder.load_family(path, {})
    door = door or Ingest(store)
    if not number_pictures:
        return cast(Renderer, folder.load_renderer(path, family, door))
    if not getattr(folder, "CAN_NUMBER_PICTURES", False):
        raise FamilyError(
            f"the chat format of {path} does not number pictures",
            "remove [model] number_pictures from the run file",
        )
    return cast(Renderer, folder.load_renderer(path, family, door, number_pictures=True))


def load_forward(
    model: str | Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> Forward:
    """The model itself, with torch; `attention` is a name that transformers' registry knows."""
    load = _file_of(family.name, "forward").load
    return cast(Forward, load(find_checkpoint(model, True), family, device, dtype, attention))


def load_serving(model: str | Path, family: Family, takes_updates: bool = True) -> Serving:
    """How an engine that is not ours names the family's things, if it can serve the checkpoint."""
    try:
        serving = cast(Serving, _file_of(family.name, "serving"))
    except ModuleNotFoundError as error:
        raise FamilyError(
            f"the family {family.name} does not say how vLLM names its images",
            'set engine = "torch", or add serving.py to its folder: see docs/adding_a_family.md',
        ) from error
    serving.check_served(find_checkpoint(model), takes_updates)
    return serving


def write_tiny(name: str, path: Path, seed: int, **options: Any) -> None:
    """Writes the small random checkpoint of family `name`."""
    if name not in family_names():
        raise FamilyError(f"no family {name!r}", f"choose one of {', '.join(family_names())}")
    _file_of(name, "tiny").write(path, seed=seed, **options)
