"""Builds a `Rendered` piece by piece: text runs, special tokens, images."""

from __future__ import annotations

from sightline.errors import PromptTooLong
from sightline.render.protocol import Bridged, Rendered
from sightline.render.tokenizer import Tokenizer
from sightline.wire import MediaItem, Slot, Span

MAX_OVERFLOW = 8
"""The multiple of `max_model_len` at which emitting stops early."""
SHORTEN = "send less text, keep a window of the history, or raise [inference] max_model_len"


class Emitter:
    """Collects ids, slots and spans, starting at an absolute offset.

    Consecutive texts are tokenized as one, because BPE merges across the boundary between a role
    header and the content, and templates write them as one string.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, max_model_len: int = 0) -> None:
        """Text that cannot fit into `max_model_len` tokens is not tokenized. 0 is no limit."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_chars = 0
        self._start = start
        self._ids: list[int] = []
        self._run: list[str] = []
        self._slots: list[Slot] = []
        self._spans: list[Span] = []
        self._trained: list[Span] = []
        self._seam: int | None = None
        self._trained_start = start

    @property
    def position(self) -> int:
        """The absolute offset of the next token. Reading it ends the current text."""
        self._flush()
        return self._start + len(self._ids)

    def text(self, text: str) -> None:
        self._run.append(text)

    def special(self, *token_ids: int) -> None:
        self._flush()
        self._ids.extend(token_ids)

    def marked(self, text: str) -> None:
        """Emit text of the chat format itself, in which added tokens become tokens.

        Never use it for a message's text.
        """
        for i, piece in enumerate(self._tokenizer.added_pattern.split(text)):
            if i % 2:
                self.special(self._tokenizer.added_tokens[piece])
            else:
                self.text(piece)

    def image(self, item: MediaItem, pad_id: int, count: int) -> None:
        offset = self.position
        self._ids.extend([pad_id] * count)
        self._slots.append(Slot(offset=offset, length=count, item=item))

    def end_message(self, start: int) -> None:
        self._spans.append(Span(start, self.position))

    def begin_trained(self) -> None:
        """Mark what follows as the assistant's own, without ending the current text.

        A token across the boundary is not trained, because a sampler cannot produce it.
        """
        self._seam = sum(map(len, self._run))
        self._trained_start = self._start + len(self._ids)

    def end_trained(self) -> None:
        stop = self.position
        self._trained.append(Span(self._trained_start, stop))

    def rendered(self) -> Rendered:
        self._flush()
        return Rendered(self._ids, self._slots, self._spans, self._trained)

    def bridged(self) -> Bridged:
        self._flush()
        return Bridged(self._ids, self._slots, self._spans)

    def _check_fits(self, run: str) -> None:
        """Raise PromptTooLong for far too much text, before it is tokenized."""
        most, tokenizer = self._max_model_len, self._tokenizer
        if not most:
            return
        self._num_chars += tokenizer.count_chars(run, most * tokenizer.max_token_chars)
        if self._num_chars > most * tokenizer.max_token_chars:
            raise PromptTooLong.at(
                "messages",
                f"at least {self._num_chars} characters of text cannot fit into max_model_len = "
                f"{most} tokens, each of at most {tokenizer.max_token_chars} characters",
                SHORTEN,
            )
        if len(self._ids) > MAX_OVERFLOW * most:
            raise PromptTooLong.at(
                "messages",
                f"at least {len(self._ids)} tokens, but max_model_len is {most}",
                SHORTEN,
            )

    def _flush(self) -> None:
        run, seam = "".join(self._run), self._seam
        self._run.clear()
        self._seam = None
        self._check_fits(run)
        if seam:
            ids, num_before = self._tokenizer.encode_with_boundary(run, seam)
            self._trained_start = self._start + len(self._ids) + num_before
            self._ids.extend(ids)
        elif run:
            self._ids.extend(self._tokenizer.encode(run))
