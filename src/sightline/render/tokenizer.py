"""Load and use a checkpoint's tokenizer, with only the `tokenizers` library."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from sightline.errors import FamilyError, MessageError
from sightline.regular_file import read_text

MAX_BYTES = 1 << 28
"""The size of the largest tokenizer.json that is read."""


class Tokenizer:
    """A tokenizer that encodes text without added tokens, and looks up added tokens by name.

    A message's text may contain the name of a special token. `encode_with_starts` never produces
    that token.
    Renderers call `token_id` for the marks of their format.
    """

    def __init__(self, path: Path, description: str | None = None) -> None:
        """Read tokenizer.json in `path`, or a `description` in the same format."""
        file = path / "tokenizer.json"
        if description is None and not file.is_file():
            raise FamilyError(f"{path} has no tokenizer.json", "copy it from the checkpoint")
        try:
            if description is None:
                if (size := file.stat().st_size) > MAX_BYTES:
                    raise ValueError(f"it has {size} bytes, above the limit of {MAX_BYTES}")
                description = read_text(file)
            self._full = tokenizers.Tokenizer.from_str(description)
            # The library always matches added tokens in text first, whether special or not.
            plain = json.dumps({**json.loads(description), "added_tokens": []})
            self._plain = tokenizers.Tokenizer.from_str(plain)
        except Exception as error:  # the library raises no specific type
            problem = f"{file} is broken: {error}"
            raise FamilyError(problem, "copy it again from the checkpoint") from error
        self._full.no_truncation()
        self._full.no_padding()
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self.max_token_chars: int = max(map(len, self._plain.get_vocab()), default=1)
        """The length of the longest token in characters, or in bytes for byte-level tokenizers."""
        added = self._full.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: i for i, token in added.items()}
        """The ids of added tokens by name."""
        spellings = map(re.escape, sorted(self.added_tokens, key=len, reverse=True))
        self.added_pattern = re.compile("(" + "|".join(spellings) + ")")

    @staticmethod
    def count_chars(text: str, most: int) -> int:
        """Return the length of `text` after Unicode normalization.

        At most four characters compose into one, so text over 4 * `most` is not normalized.
        """
        if not most < len(text) <= 4 * most:
            return len(text)
        return len(unicodedata.normalize("NFC", text))

    def encode_marked(self, text: str) -> list[int]:
        """Encode text including added tokens. Never use this for a message's text."""
        return list(_encode(self._full, text).ids)

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of `text`, and the index of each token's first character."""
        encoded = _encode(self._plain, text)
        return list(encoded.ids), [start for start, _ in encoded.offsets]

    def token_id(self, token: str) -> int:
        token_id = self.find_token_id(token)
        if token_id is None:
            raise FamilyError(
                f"the tokenizer has no token {token!r}",
                "copy the tokenizer files from the checkpoint",
            )
        return token_id

    def find_token_id(self, token: str) -> int | None:
        token_id = self._full.token_to_id(token)
        return None if token_id is None else int(token_id)

    def list_tokens(self) -> dict[int, str]:
        """Return every token by its id, as the tokenizer's file spells it."""
        return {i: token for token, i in self._full.get_vocab(with_added_tokens=True).items()}

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._full.decode([int(i) for i in token_ids], skip_special_tokens=False))


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except BaseException as error:
        # The library panics, for example, where its regular expression gives up on the text.
        if type(error).__name__ != "PanicException":
            raise
        raise MessageError(
            f"the tokenizer fails on a text of {len(text)} characters: {error}",
            "send another text, or use the tokenizer.json that was published with the checkpoint",
        ) from None


def split_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits text into the words of `pattern`, as bytes."""
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, as_bytes])
