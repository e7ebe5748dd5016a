"""Details of Qwen3-VL's chat format. The rest is in the contract suite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from sightline import FamilyError, MediaStore, load_renderer
from sightline.message import Message, assistant, system, user
from sightline.render import Bridged, Renderer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def renderer(tiny_model: Path, store: MediaStore) -> Renderer:
    return load_renderer(tiny_model, store)


def test_a_conversation_reads_as_written_down(renderer: Renderer, store: MediaStore) -> None:
    ref = store.put(Image.new("RGB", (64, 32)))
    messages = [system("be brief"), user("see", ref), assistant("A"), user("and?")]
    assert renderer.decode(renderer.render(messages).token_ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nsee<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_neighbouring_tool_messages_share_a_turn(renderer: Renderer) -> None:
    tool = {"role": "tool", "content": "3"}
    prompt = renderer.render([user("add")]).token_ids
    bridged = renderer.bridge(prompt, [renderer.stop_token_ids[0]], [tool, tool, user("so?")])
    assert isinstance(bridged, Bridged)
    assert renderer.decode(bridged.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )
    texts = [
        renderer.decode(bridged.token_ids[s.start - len(prompt) - 1 : s.stop - len(prompt) - 1])
        for s in bridged.spans
    ]
    assert texts[1] == "\n<tool_response>\n3\n</tool_response><|im_end|>\n"


@pytest.mark.parametrize(
    "broken",
    ["{", '{"name": 3}', '{"arguments": {}}', '{"name": "f"} and more', ""],
)
def test_a_call_that_is_not_whole_stays_in_the_content(renderer: Renderer, broken: str) -> None:
    said = Message(role="assistant", content=user("a").content)
    rendered = renderer.render([user("hi"), said], generation_prompt=False)
    own = rendered.trained[0]
    mark, end = (_token(renderer, name) for name in ("<tool_call>", "</tool_call>"))
    inner = renderer.render([user(broken)]).token_ids[3:-5]
    assert renderer.decode(inner) == broken
    ids = rendered.token_ids[own.start : own.stop - 1] + [mark, *inner, end]
    message = renderer.parse([*ids, renderer.stop_token_ids[0]])
    assert message.tool_calls == ()
    assert message.text == f"a<tool_call>{broken}</tool_call>"
    open_call = renderer.parse(ids[:-1])
    assert open_call.tool_calls == ()
    assert open_call.text == f"a<tool_call>{broken}"


def _token(renderer: Renderer, name: str) -> int:
    found = [i for i in range(renderer.vocab_size) if renderer.decode([i]) == name]
    assert len(found) == 1
    return found[0]


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["vocab_size"] = 100
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="100"):
        load_renderer(copy, MediaStore(tmp_path))
