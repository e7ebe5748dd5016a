"""The dashboard's files: the browser loads them as they are."""

import hashlib
import re

from sightline.view.dashboard.server import STATIC, list_static_files


def test_vendored_libraries_match_their_checksums():
    vendor = STATIC / "vendor"
    listed = re.findall(r"^\| `([^`]+)` .*\((LICENSE[^)]+)\).* `(\w{64})` \|$",
                        (vendor / "README.md").read_text(), re.M)  # fmt: skip
    assert {name for name, _, _ in listed} == {
        file.name for file in vendor.iterdir() if file.suffix in (".js", ".mjs", ".css")
    }
    for name, license_file, checksum in listed:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == checksum, name
        assert (vendor / license_file).is_file()


def test_every_import_is_relative_and_resolves_to_a_file():
    for name, file in list_static_files().items():
        if file.suffix in (".js", ".mjs"):
            for target in re.findall(r'^import\b[^;"]*"([^"]+)"', file.read_text(), re.M):
                assert target.startswith("."), (name, target)
                assert (file.parent / target).is_file(), (name, target)
