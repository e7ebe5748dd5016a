"""The pages of docs/ name files, settings, commands and messages that exist.

Blocks that a CPU can run are run: environments by tests/unit/envs/test_docs.py, algorithms by
tests/unit/algo/test_docs.py, a notebook by tests/unit/view/test_notebook.py, the smallest
benchmarks by `make bench-small`, all others here. The rest is parsed, and the run files that it
names are loaded.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_small
import command_page
import pytest
from PIL import Image

import benchmarks
import sightline.bench
from benchmarks.__main__ import parse as parse_benchmark
from sightline import MediaStore, config
from sightline.cli import main as cli
from sightline.config.load import (
    apply_overrides,
    expand_overrides,
    load_config,
    validate_config,
)
from sightline.config.renamed import RENAMED
from sightline.families import load_renderer
from sightline.trace import PolicySpan

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "sightline"
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md")]
    + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
)
NAMES = [page.name for page in PAGES]
KEYS = {
    (section, name)
    for kind in (config.RunFile, config.SftFile)
    for section, name, _ in config.iter_settings(kind)
}


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        target_page = (page.parent / path).resolve() if path else page
        if not target_page.exists() or (anchor and anchor not in anchors_of(target_page)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_named_in_docs_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/.<:])((?:[\w.]+/)+\w+\.(?:py|toml|md))\b", page.read_text())
    roots = (ROOT, SRC, page.parent)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_named_in_docs_exist(page: Path) -> None:
    text = " ".join(page.read_text().split())
    sections = {section for section, _ in KEYS}
    named = set(re.findall(r"`\[(\w+)\] (\w+)\b", text))
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
        for section, values in tomllib.loads(block).items():
            named |= {(section, key) for key in values}
    assert [(s, key) for s, key in sorted(named - KEYS) if s in sections] == []
    old = {was.split(".")[1] for was, now in RENAMED.items() if was.split(".")[1] not in now}
    assert [key for key in old if "_" in key and re.search(rf"`{key}\b", text)] == []


def blocks(page: Path, *kinds: str) -> list[str]:
    """The code blocks of a page. A kind of "" has no language after its fence."""
    matches = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [text for kind, text in matches if kind in kinds]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_and_json_blocks_parse(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "json"):
        json.loads(text)


def read_commands(page: Path) -> Iterator[tuple[Path, list[str]]]:
    """The words of every command of a page, with the folder that it is given in."""
    for text in blocks(page, "sh", ""):
        folder = ROOT
        for line in text.replace("\\\n", " ").splitlines():
            command = re.match(
                r"(?:[A-Z_]+=\S+ |torchrun .* -m )?((?:sightline|python -m benchmarks|make|cd) .*)",
                line,
            )
            if not command:
                continue
            words = shlex.split(command[1], comments=True)
            if words[0] == "cd":
                folder = folder / words[1]
            else:
                yield folder, words
    in_tables = r"^\|.*`((?:sightline bench|python -m benchmarks) [^`|]*--[^`|]*)`"
    for command in re.findall(in_tables, page.read_text(), re.M):
        yield ROOT, shlex.split(command)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_documented_commands_parse_and_their_run_files_load(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for folder, words in read_commands(page):
        if words[0] == "make":
            named = {word for word in words[1:] if "=" not in word}
            assert named and named <= targets, words
            continue
        if words[0] == "python":
            parse_benchmark([word for word in words[3:] if word != "..."])
            continue
        args = cli.parse([word for word in words[1:] if word != "..."])
        overrides = getattr(args, "overrides", [])
        if words[1] in ("rl", "sft") and args.file and (folder / args.file).is_file():
            kind = config.RunFile if words[1] == "rl" else config.SftFile
            load_config(kind, folder / args.file, overrides)
            continue
        for combination in expand_overrides(overrides) if overrides else ():
            values: dict[str, Any] = {}
            apply_overrides(values, combination)
            whole = complete(values)
            kind = config.SftFile if "sft" in whole else config.RunFile
            validate_config(kind, whole, page.name)


def complete(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a block, with those that a run file must have."""
    settings = {"model": {"path": "models/tiny"}}
    if "sft" in values or "data" in values:
        settings["sft"] = {"output_dir": "models/out"}
        values = {name: keys for name, keys in values.items() if name != "env"}
        settings.update({} if "data" in values else {"data": {"path": "talks.jsonl"}})
    elif not values.get("env", {}).keys() & {"name", "mix"}:
        settings["env"] = {"name": "color_codeword"}
    return {
        name: {**settings.get(name, {}), **values.get(name, {})} for name in {**settings, **values}
    }


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_blocks_of_a_page_load(page: Path) -> None:
    for text in blocks(page, "toml"):
        values = tomllib.loads(text)
        if not values.keys() <= {section for section, _ in KEYS}:
            continue  # no run file
        whole = complete(values)
        kind = config.SftFile if "sft" in whole else config.RunFile
        validate_config(kind, whole, page.name)


def test_documented_store_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30)).save("page.png")
    (text,) = blocks(ROOT / "docs" / "media.md", "python")
    names: dict[str, Any] = {}
    exec(compile(text, "media.md", "exec"), names)
    assert names["store"].image(names["ref"]).size == (40, 30)


def test_documented_trace_example_works(tiny_model: Path, store: MediaStore) -> None:
    renderer = load_renderer(tiny_model, store)
    names: dict[str, Any] = {
        "renderer": renderer,
        "ref": store.put(Image.new("RGB", (32, 32))),
        "completion_ids": [41, renderer.stop_token_ids[0]],
        "logprobs": [-0.1, -0.2],
        "versions": (PolicySpan(version=0, epoch=0, start=0, stop=2),),
        "finish_reason": "stop",
        "pixel_digests": ["0" * 32],
    }
    text = blocks(ROOT / "docs" / "traces.md", "python")[0]
    exec(compile(text, "traces.md", "exec"), names)
    assert (
        names["turn"].prompt_ids[: len(names["node"].token_ids)] and len(names["trace"].turns) == 1
    )


def test_commands_page_matches_the_parsers() -> None:
    assert command_page.PAGE.read_text() == command_page.describe(), "run `make docs`"


def test_python_api_page_lists_every_public_name() -> None:
    page = command_page.API_PAGE.read_text()
    assert page == command_page.describe_names(page), "run `make docs`"
    assert all(re.search(rf"^\| `{name}` \| \S.* \|$", page, re.M) for name in sightline.__all__)


def test_every_page_is_listed_once_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": ([\w/]+\.md)$", nav, re.M)
    assert sorted(named) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    )


def test_site_loads_no_external_resource() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "\n  font: false\n" in settings and "://" not in settings


def test_every_benchmark_has_a_smallest_size() -> None:
    commands = bench_small.read_commands()
    packaged = {words[2] for words in commands if words[1] == "bench"}
    others = {words[3] for words in commands if words[:2] == ["python", "-m"]}
    assert packaged == set(sightline.bench.BENCHMARKS)
    assert others == set(benchmarks.BENCHMARKS)
    assert bench_small.read_commands()[0][1:3] == ["model", "tiny"]


def read_messages() -> set[str]:
    """The texts of src, with `…` in place of each value."""
    messages = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                messages.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages.add(node.value)
    return messages


def test_troubleshooting_messages_match_the_actual_errors() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [row.partition(" | ")[0] for row in re.findall(r"^\| (`.*)$", page, re.M)]
    messages = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    known = "\0".join(read_messages())
    patterns = {
        text: "[^\0]*?".join(re.escape(part) for part in text.split("…") if part)
        for text in messages
    }
    unknown = [text for text, words in patterns.items() if not re.search(words, known)]
    assert unknown == []


@pytest.mark.parametrize("title", ["An image, from", "A sampled token, from"])
def test_architecture_walkthrough_names_each_file_once(title: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (walk,) = re.findall(rf"^## {title}.*?(?=^## |\Z)", page, re.M | re.S)
    files = re.findall(r"^\d+\. `([\w/]+\.py)`: ", walk, re.M)
    assert len(files) > 20 and len(files) == len(set(files))
    assert len(re.findall(r"[\w/]+\.py\b", walk)) == len(files), "every file in its own line"
    assert [file for file in files if not (SRC / file).is_file()] == []


def test_the_changelog_has_every_renamed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = [f"| `{spell(was)}` | `{spell(now)}` |" for was, now in RENAMED.items()]
    assert [row for row in rows if row not in text] == []


def spell(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"[{section}] {name}"
