"""The files of a run, complete, missing or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from store_kinds import KINDS, TOKEN

from sightline.errors import MediaMissing
from sightline.run import RunDir
from sightline.view.run_files import RunFiles

CONFIG = '[media]\nroot = "{}"\ntoken = "env:MEDIA_TOKEN"\ncache_dir = "{}"\ncache_gb = 1.0\n'


def test_images_of_a_remote_store_are_shown_if_its_token_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    with KINDS["http"](tmp_path) as kind:
        ref = kind.store.put(Image.new("RGB", (4, 4)))
        text = CONFIG.format(kind.store.root, tmp_path / "shown")
        (tmp_path / "run" / "config.toml").write_text(text)
        files = RunFiles(RunDir(tmp_path / "run"))
        with pytest.raises(MediaMissing):
            files.open_store().get(ref)
        monkeypatch.setenv("MEDIA_TOKEN", TOKEN)
        store = files.open_store()
        assert store.get_ref(ref.digest) == ref
        assert store.image(ref).size == (4, 4)
        assert kind.backing.names() == [f"{ref.digest[:2]}/{ref.digest[2:4]}/{ref.digest}"]
        assert not (tmp_path / "run" / "media").exists()
