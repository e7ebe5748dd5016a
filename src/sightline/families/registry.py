"""Finds the family of a checkpoint. It looks at folders and names none."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import sightline.families as families_package
from sightline.errors import FamilyError
from sightline.families.hub import find_checkpoint
from sightline.families.protocol import Family, Forward
from sightline.media import Ingest, MediaStore
from sightline.message import Door
from sightline.render import Renderer

if TYPE_CHECKING:
    import torch


def family_names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(families_package.__path__) if m.ispkg)


def first_family() -> str:
    """The family that commands take when none is named: the folder that says so of itself."""
    names = family_names()
    return next((n for n in names if getattr(_folder(n), "IS_FIRST", False)), names[0])


def _folder(name: str) -> ModuleType:
    return importlib.import_module(f"sightline.families.{name}")


def _folder_of(path: Path) -> ModuleType:
    config = read_config(path)
    for name in family_names():
        folder = _folder(name)
        if folder.claims(config):
            return folder
    raise FamilyError(
        f"{path} is a {config.get('model_type')!r} checkpoint, which no family here knows",
        f"use a checkpoint of {', '.join(family_names())}, or add a folder for it in families/",
    )


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
    module = importlib.import_module(f"sightline.families.{family.name}.forward")
    return cast(
        Forward, module.load(find_checkpoint(model, True), family, device, dtype, attention)
    )


def write_tiny(name: str, path: Path, seed: int, **options: Any) -> None:
    """Writes the small random checkpoint of family `name`."""
    if name not in family_names():
        raise FamilyError(f"no family {name!r}", f"choose one of {', '.join(family_names())}")
    importlib.import_module(f"sightline.families.{name}.tiny").write(path, seed=seed, **options)
