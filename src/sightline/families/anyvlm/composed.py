"""A conversation as the chat template writes it, and its tokens with their places in the text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sightline.errors import PromptTooLong
from sightline.render import Tokenizer
from sightline.render.emitter import SHORTEN
from sightline.wire import MediaItem


@dataclass
class Composed:
    """The text of a conversation, and where its parts are."""

    text: str
    """The whole text, with each image as the template writes it."""
    pieces: list[tuple[str, bool]]
    """Its parts in order, and whether the template wrote each of them itself."""
    ends: list[int]
    """The end of each message in `text`."""
    answers: list[tuple[int, int]]
    """The start and end of each answer, without its header and the token that ends its turn."""


@dataclass
class TokenRun:
    """Tokens, each with the index of its first character in the composed text."""

    tokenizer: Tokenizer
    max_model_len: int
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    slots: list[tuple[int, int, MediaItem]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    _num_chars: int = 0

    def add_text(self, text: str, places: Sequence[int]) -> None:
        self._text.append(text)
        self._places += places

    def add_token(self, token_id: int, place: int, times: int = 1) -> None:
        self.flush()
        self.ids += [token_id] * times
        self.starts += [place] * times

    def flush(self) -> None:
        text, places = "".join(self._text), self._places
        self._text, self._places = [], []
        if not text:
            return
        most = self.max_model_len * self.tokenizer.max_token_chars
        self._num_chars += self.tokenizer.count_chars(text, most)
        if self.max_model_len and self._num_chars > most:
            raise PromptTooLong.at(
                "messages",
                f"at least {self._num_chars} characters of text cannot fit into max_model_len = "
                f"{self.max_model_len} tokens",
                SHORTEN,
            )
        ids, starts = self.tokenizer.encode_with_starts(text)
        self.ids += ids
        # A normalizer may change the length: starts after the end belong to the last character.
        starts_in_text = (places[min(start, len(places) - 1)] for start in starts)
        self.starts += accumulate(starts_in_text, max)

    def find(self, place: int) -> int:
        """Return the index of the first token that begins at `place` or later."""
        return bisect_left(self.starts, place)
