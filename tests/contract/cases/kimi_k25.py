"""Kimi K2.5, with two sets of merges."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shards import IS_FULL

from tests.contract.case import EXTRA_MERGES, Case


def _write_kimi(path: Path) -> None:
    from sightline.families.kimi_k25 import tiny

    tiny.write(path)


def _write_kimi_with_merges(path: Path) -> None:
    """With marks of reasoning that are tokens."""
    from sightline.families.kimi_k25 import tiny

    merges = [merge for merge in EXTRA_MERGES if merge != ("t", "h")]  # which it has already
    tiny.write(path, extra_merges=[*merges, (">", "A")])


class KimiImages:
    """Counts patches by the function of transformers' processor.

    The processor itself imports torchvision, which this machine has not: the function is taken
    out of its source.
    """

    def __init__(self, path: Path) -> None:
        import transformers

        folder = Path(transformers.__file__).parent / "models" / "kimi_k25"
        tree = ast.parse((folder / "image_processing_kimi_k25.py").read_text())
        functions = [
            n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize"
        ]
        names: dict[str, Any] = {"math": math}
        exec(compile(ast.Module(functions, []), "navit_resize", "exec"), names)
        self.resize: Callable[..., Any] = names["navit_resize"]
        self.raw = json.loads((path / "preprocessor_config.json").read_text())
        self.merge_size = int(self.raw["merge_size"])

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        raw = self.raw
        limits = (raw["max_patches"], raw["size"]["max_height"])
        _, padded = self.resize(height, width, raw["patch_size"], self.merge_size, *limits)
        return int(math.prod(padded)) // int(raw["patch_size"]) ** 2


def _kimi_settings(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from sightline.families.kimi_k25.tool_declaration import declare_tools

    # The published tokenizer builds the declaration in Python and passes it to the template.
    return {"thinking": False, "tools_ts_str": declare_tools(tools)}


def _kimi(name: str, write: Callable[[Path], None], has_weights: bool) -> Case:
    return Case(
        name,
        write,
        KimiImages,
        "<|media_pad|>",
        published_template=None,
        has_weights=has_weights,
        has_own_format=not has_weights or IS_FULL,
        overrides=(("max_pixels", 1 << 20),),
        refused_size=None,
        shows_system_images=True,
        takes_reasoning=True,
        fades_reasoning=True,
        template_settings=_kimi_settings,
    )


CASES = (
    _kimi("kimi_k25", _write_kimi, has_weights=True),
    _kimi("kimi_k25_merges", _write_kimi_with_merges, has_weights=False),
)
