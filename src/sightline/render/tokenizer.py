"""A checkpoint's tokenizer, by the `tokenizers` library alone."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from sightline.errors import FamilyError


class Tokenizer:
    """Text to ids without any added token, and added tokens by name.

    Text of a message can hold the spelling of a special token; `encode` never makes the special
    token of it. Only `token_id`, called by a renderer for what its format emits, does.
    """

    def __init__(self, path: Path, description: str | None = None) -> None:
        """Reads tokenizer.json in `path`, or a `description` of that form, made from another."""
        file = path / "tokenizer.json"
        if description is None and not file.is_file():
            raise FamilyError(
                f"no tokenizer.json in {path}", "point [model] path at a whole checkpoint folder"
            )
        try:
            description = file.read_text() if description is None else description
            self._full = tokenizers.Tokenizer.from_str(description)
            self._plain = _without_added_tokens(description)
        except Exception as error:  # the library raises nothing narrower
            raise FamilyError(
                f"{file} is broken: {error}", "copy it again from the checkpoint"
            ) from error
        self._full.no_truncation()
        self._full.no_padding()
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self.max_token_chars: int = max(map(len, self._plain.get_vocab()), default=1)
        """Characters of the longest token, counted in bytes where tokens are made of bytes."""
        added = self._full.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: i for i, token in added.items()}
        """The ids of added tokens, by how they are spelled."""

    @staticmethod
    def count_chars(text: str, most: int) -> int:
        """Characters of `text` as it is tokenized: four may compose into one, which is looked at
        where that could bring them down to `most`."""
        if not most < len(text) <= 4 * most:
            return len(text)
        return len(unicodedata.normalize("NFC", text))

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_marked(self, text: str) -> list[int]:
        """The ids of text with every added token that it spells. Never for text of a message."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of `text`, and for each the index of its first character."""
        encoded = self._plain.encode(text, add_special_tokens=False)
        return list(encoded.ids), [start for start, _ in encoded.offsets]

    def encode_with_boundary(self, text: str, seam: int) -> tuple[list[int], int]:
        """The ids of `text`, and how many of them hold a character before index `seam`."""
        encoded = self._plain.encode(text, add_special_tokens=False)
        ids = list(encoded.ids)
        for i, (start, stop) in enumerate(encoded.offsets):
            if start >= seam and stop > seam:
                return ids, i
        return ids, len(ids)

    def token_id(self, token: str) -> int:
        found = self.find_token_id(token)
        if found is None:
            raise FamilyError(
                f"the tokenizer has no token {token!r}",
                "use the tokenizer that belongs to the checkpoint",
            )
        return found

    def find_token_id(self, token: str) -> int | None:
        found = self._full.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, token_ids: Sequence[int], skip_special: bool = False) -> str:
        return str(self._full.decode([int(i) for i in token_ids], skip_special_tokens=skip_special))


def split_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text into the words of `pattern`, as bytes, before BPE."""
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, as_bytes])


def _without_added_tokens(description: str) -> tokenizers.Tokenizer:
    # The library matches added tokens in text before anything else, special or not, and offers
    # no switch for it: the same tokenizer built from a description without them does not.
    left = json.loads(description)
    left["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(left))
