"""Parity with the real tokenizers, where merges span words, blanks and newlines as they do in use.

`make tokenizers` fetches them with npm into build/tokenizers; `make test-browser` does so first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline import MediaStore
from tests.contract.case import Case, Checkpoint
from tests.contract.cases import read_cases
from tests.contract.test_renderer import conversations, many, offered, placed, toolboxes

pytestmark = pytest.mark.browser

TOKENIZERS = Path(__file__).parents[2] / "build" / "tokenizers"
REAL = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_thinking": "qwen3",
    "qwen3": "qwen3",
    "qwen2_5_vl": "qwen2_5",
    "llama": "llama3_2",
    "llama3_merges": "llama3",
}
PUBLISHED = ("llama", "llama3_merges")
"""Cases whose published template is the one in the tokenizer's package."""


def _with_real(case: Case, tokenizer: Path) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        case.write(path)
        (path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
        settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        config = json.loads((path / "config.json").read_text())
        config.get("text_config", config)["vocab_size"] = 152_064
        (path / "config.json").write_text(json.dumps(config))

    return write


@pytest.fixture(
    scope="module", params=[c for c in read_cases() if c.name in REAL], ids=lambda c: c.name
)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    case: Case = request.param
    folder = TOKENIZERS / REAL[case.name]
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: run `make tokenizers`")
    case = replace(case, write=_with_real(case, folder))
    if case.name in PUBLISHED:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        published = tmp_path_factory.mktemp("published") / "template.jinja"
        published.write_text(settings["chat_template"])
        case = replace(case, published_template=published)
    path = tmp_path_factory.mktemp("real")
    case.write(path)
    return Checkpoint(case, path, MediaStore(tmp_path_factory.mktemp("media")))


@many
@given(messages=conversations(), tools=toolboxes, prompt=st.booleans())
def test_tokens_match_the_template_with_the_real_tokenizer(
    real: Any, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
) -> None:
    messages, tools = placed(list(messages), real), offered(tools, real)
    ours = real.renderer.render(messages, tools, generation_prompt=prompt).token_ids
    assert ours == real.template_ids(messages, tools, prompt)
    published = real.case.published_template
    # The first Llama 3 opens the next answer whether or not it is asked to.
    is_asked = prompt or real.case.name != "llama3_merges"
    if is_asked and published is not None and published.is_file():
        assert ours == real.template_ids(messages, tools, prompt, published.read_text())
