"""A model is a folder or an id of the hub, from the local cache first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sightline import FamilyError, MediaStore, load_family, load_renderer
from sightline.families.hub import SMALL_FILES, find_checkpoint
from sightline.launch.preflight import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(cache: Path, model: Path, names: list[str]) -> Path:
    repo = cache / "models--lab--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in names:
        shutil.copy(model / name, snapshot / name)
    return snapshot


def test_a_folder_is_itself(tiny_model: Path) -> None:
    assert find_checkpoint(tiny_model) == tiny_model
    assert find_checkpoint("no/such/folder/at/all") == Path("no/such/folder/at/all")


def test_an_id_is_found_in_the_cache_with_its_commit(cache: Path, tiny_model: Path) -> None:
    names = [name for name in SMALL_FILES if (tiny_model / name).is_file()]
    snapshot = keep(cache, tiny_model, names)
    assert find_checkpoint("lab/tiny") == snapshot
    assert find_checkpoint(f"lab/tiny@{COMMIT}") == snapshot
    assert load_family("lab/tiny").fingerprint == load_family(tiny_model).fingerprint
    assert load_renderer("lab/tiny", MediaStore(cache.parent / "media")).vocab_size
    with pytest.raises(FamilyError, match=r"lacks \*\.safetensors"):
        find_checkpoint("lab/tiny", with_weights=True)


def test_offline_with_nothing_cached_is_an_error_that_names_the_files(cache: Path) -> None:
    with pytest.raises(FamilyError, match="is no folder") as caught:
        find_checkpoint("lab/tiny")
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        assert name in caught.value.fix


def test_the_resolved_run_file_names_the_commit(cache: Path, tiny_model: Path) -> None:
    from sightline.config import SftFile

    snapshot = keep(cache, tiny_model, [file.name for file in tiny_model.iterdir()])
    config = SftFile.model_validate(
        {"model": {"path": "lab/tiny"}, "env": {"name": "color_codeword"}, "sft": {"output": "x"}}
    )
    assert resolve_model(config).model.path == str(snapshot)
