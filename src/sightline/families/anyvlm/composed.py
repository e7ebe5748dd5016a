"""What a template makes of a conversation, and its tokens with the places that they come from."""

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
    """What the template makes of a conversation, with what each part of it is."""

    text: str
    """All of it, each image as the template writes it."""
    pieces: list[tuple[str, bool]]
    """Its parts in order, and whether the template wrote them itself."""
    ends: list[int]
    """For each message where it ends in `text`."""
    answers: list[tuple[int, int]]
    """For each message of the assistant where it begins and ends, behind its header and before the
    token that ends its turn."""


@dataclass
class TokenRun:
    """Tokens, for each the index in the composed text of what it begins with."""

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
                f"{self._num_chars} characters of text or more cannot fit into max_model_len = "
                f"{self.max_model_len} tokens",
                SHORTEN,
            )
        ids, starts = self.tokenizer.encode_with_starts(text)
        self.ids += ids
        # A normalizer may shorten a text: what is behind its end belongs to its last character.
        found = (places[min(start, len(places) - 1)] for start in starts)
        self.starts += accumulate(found, max)

    def find(self, place: int) -> int:
        """The index of the first token that begins at `place` or behind it."""
        return bisect_left(self.starts, place)
