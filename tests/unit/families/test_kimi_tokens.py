"""A folder in Kimi K2.5's published form: ranks and special tokens. No code is run."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from sightline import FamilyError, MediaStore, load_family, load_renderer
from sightline.families.kimi_k25 import tiny
from sightline.families.kimi_k25.tokenizer import NUM_SPECIAL_TOKENS, load_tokenizer
from sightline.message import user

TEXTS = (
    "user assistant <think></think> it's 12345 cats",
    "漢字かな HelloWorld's\n\n  two  spaces\t\n",
    "e\u0301 🙂👩‍👩‍👧 Привет <|im_end|> \r\n x",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    tiny.write(path)
    return path


@pytest.fixture
def published(checkpoint: Path, tmp_path: Path) -> Path:
    """Return the tiny checkpoint in the release's layout, with code that fails when run."""
    path = Path(shutil.copytree(checkpoint, tmp_path / "published"))
    library = Library.from_file(str(checkpoint / "tokenizer.json"))
    words = sorted(library.get_vocab(with_added_tokens=False).items(), key=lambda pair: pair[1])
    letters = {c: byte for byte, c in enumerate(byte_letters())}
    lines = [base64.b64encode(bytes(letters[c] for c in w)) + b" %d" % i for w, i in words]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (path / "tokenizer.json").unlink()
    for name in ("tokenization_kimi.py", "configuration_kimi_k25.py"):
        (path / name).write_text("raise SystemExit('code of the checkpoint was run')")
    edit(path / "config.json", auto_map={"AutoConfig": "configuration_kimi_k25.KimiK25Config"})
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {
        "model_type": "kimi_k2",
        "vocab_size": len(words) + NUM_SPECIAL_TOKENS,
    }
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    (path / "config.json").write_text(json.dumps(config))
    return path


def byte_letters() -> list[str]:
    """Return GPT-2's character for each byte: itself if printable, else a letter from 256 on."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + hidden.index(b)) for b in range(256)]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_merge_ranks_reproduce_the_original_tokenizer(checkpoint: Path, published: Path) -> None:
    ours, theirs = load_tokenizer(published), load_tokenizer(checkpoint)
    for text in TEXTS:
        token_ids, starts = ours.encode_with_starts(text)
        assert (token_ids, starts) == theirs.encode_with_starts(text)
        assert ours.decode(token_ids) == text
    assert len(theirs.added_tokens) == 23
    for token in theirs.added_tokens:
        assert ours.token_id(token) == theirs.token_id(token)


def test_a_published_folder_renders_without_its_code(
    checkpoint: Path, published: Path, store: MediaStore
) -> None:
    messages = [user(text) for text in TEXTS]
    ours, theirs = load_renderer(published, store), load_renderer(checkpoint, store)
    assert ours.render(messages).token_ids == theirs.render(messages).token_ids
    assert ours.pad_token_ids == theirs.pad_token_ids
    assert load_family(published).slot_token_ids == (ours.pad_token_ids[0],)


def test_turn_opens_with_reasoning_by_default(published: Path, store: MediaStore) -> None:
    config = json.loads((published / "tokenizer_config.json").read_text())
    del config["thinking"]
    (published / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = load_renderer(published, store)
    assert renderer.decode(renderer.render([user("a")]).token_ids).endswith("<think>")


@pytest.mark.parametrize("damage", ["not base64", "a gap", "no config", "a far token"])
def test_a_damaged_folder_is_refused(published: Path, damage: str) -> None:
    ranks, config = published / "tiktoken.model", published / "tokenizer_config.json"
    if damage == "not base64":
        ranks.write_text("?? 0\n")
    elif damage == "a gap":
        ranks.write_bytes(b"\n".join(ranks.read_bytes().splitlines()[1:]))
    elif damage == "no config":
        config.unlink()
    else:
        edit(config, added_tokens_decoder={"99999": {"content": "<|x|>"}})
    with pytest.raises(FamilyError):
        load_tokenizer(published)
