"""Load the published tokenizer: a file of BPE ranks and a JSON file of special tokens.

The published Python code is not run. The ranks define the merges and their order, so the
`tokenizers` library produces the same tokens.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.regular_file import read_bytes
from sightline.render import Tokenizer
from sightline.render.tokenizer import split_words

RANKS_FILE = "tiktoken.model"
NUM_SPECIAL_TOKENS = 256
"""The number of ids reserved for special tokens, after the ranks."""

# Patterns that split text into words before BPE. Chinese characters form separate words.
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORD_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load tokenizer.json if it exists, otherwise the published files."""
    if (path / "tokenizer.json").is_file() or not (path / RANKS_FILE).is_file():
        return Tokenizer(path)
    return Tokenizer(path, _build_tokenizer_json(path))


def _build_tokenizer_json(path: Path) -> str:
    """Convert the published files to the format of tokenizer.json."""
    ranks = read_ranks(path / RANKS_FILE)
    letters = _byte_letters()
    spelled = {token: "".join([letters[value] for value in token]) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[a], spelled[b]) for a, b in find_merges(ranks)]
    # Like the published code, do not merge the parts of a word that is a token.
    tokenizer = Library(BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = split_words(WORD_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    described["added_tokens"] = _added_tokens(path, len(ranks))
    return json.dumps(described)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the tokens of a rank file with their ids, which start at 0 and have no gaps."""
    try:
        pairs = [line.split() for line in read_bytes(file).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        problem = f"{file} is not a file of BPE ranks: {error}"
        raise FamilyError(problem, "download it again") from error
    is_gapless = sorted(ranks.values()) == list(range(len(pairs)))
    if not is_gapless or any(bytes([value]) not in ranks for value in range(256)):
        raise FamilyError(f"{file} has gaps among its {len(pairs)} ranks", "download it again")
    return ranks


def find_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that merge into a token, ordered by its rank."""
    return [
        (token[:i], token[i:])
        for token, _ in sorted(ranks.items(), key=lambda pair: pair[1])
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]


def _added_tokens(path: Path, first: int) -> list[dict[str, Any]]:
    """Return a token for every reserved id, so that named tokens keep their ids."""
    file = path / "tokenizer_config.json"
    if not file.is_file():
        raise FamilyError(f"{path} has no tokenizer_config.json", "copy it from the checkpoint")
    raw = read_json(file).get("added_tokens_decoder") or {}
    tokens = {int(token_id): token for token_id, token in raw.items()}
    for token_id in tokens:
        if not first <= token_id < first + NUM_SPECIAL_TOKENS:
            reserved = f"the {NUM_SPECIAL_TOKENS} ids after the {first} ranks"
            problem = f"{file}: token {token_id} is not among {reserved}"
            raise FamilyError(problem, "copy tokenizer_config.json from the same checkpoint")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {
            "id": token_id,
            "content": tokens.get(token_id, {}).get("content", f"<|reserved_token_{token_id}|>"),
            "special": tokens.get(token_id, {}).get("special", True),
            **flags,
        }
        for token_id in range(first, first + NUM_SPECIAL_TOKENS)
    ]


def _byte_letters() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    return [chr(value) if value in printable else next(others) for value in range(256)]
