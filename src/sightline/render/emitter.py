"""Build a `Rendered` from texts, special tokens and images."""

from __future__ import annotations

from sightline.errors import PromptTooLong
from sightline.render.protocol import Bridged, Rendered
from sightline.render.tokenizer import Tokenizer
from sightline.wire import MediaItem, Slot, Span

MAX_OVERFLOW = 8
"""Emitting stops early after this multiple of `max_model_len` tokens."""
SHORTEN = "send less text, keep a window of the history, or raise [inference] max_model_len"


class Emitter:
    """A builder for ids, slots and spans, starting at an absolute offset.

    Consecutive texts are tokenized together. Templates write them as one string, and BPE merges
    across the boundary between a role header and the content.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, max_model_len: int = 0) -> None:
        """Create an emitter. `max_model_len` limits the text to tokenize. 0 means no limit."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_chars = 0
        self._start = start
        self.ids: list[int] = []
        self._run: list[str] = []
        self.slots: list[Slot] = []
        self._spans: list[Span] = []
        self._trained: list[Span] = []
        self._seam: int | None = None
        self._trained_start = start

    @property
    def position(self) -> int:
        """The absolute offset of the next token. Reading it ends the current text."""
        self._flush()
        return self._start + len(self.ids)

    def text(self, text: str) -> None:
        self._run.append(text)

    def special(self, *token_ids: int) -> None:
        self._flush()
        self.ids.extend(token_ids)

    def marked(self, text: str) -> None:
        """Emit text of the chat format itself. Added tokens in it become tokens.

        Never use it for a message's text.
        """
        for i, piece in enumerate(self._tokenizer.added_pattern.split(text)):
            if i % 2:
                self.special(self._tokenizer.added_tokens[piece])
            else:
                self.text(piece)

    def image(self, item: MediaItem, pad_id: int, count: int) -> None:
        offset = self.position
        self.ids.extend([pad_id] * count)
        self.slots.append(Slot(offset=offset, length=count, item=item))

    def end_message(self, start: int) -> None:
        self._spans.append(Span(start, self.position))

    def begin_trained(self) -> None:
        """Start the assistant's own tokens, without ending the current text.

        A token across the boundary is not trained, because a sampler cannot produce it.
        """
        self._seam = sum(map(len, self._run))
        self._trained_start = self._start + len(self.ids)

    def end_trained(self) -> None:
        stop = self.position
        self._trained.append(Span(self._trained_start, stop))

    def rendered(self) -> Rendered:
        self._flush()
        return Rendered(self.ids, self.slots, self._spans, self._trained)

    def bridged(self) -> Bridged:
        self._flush()
        return Bridged(self.ids, self.slots, self._spans)

    def _check_fits(self, run: str) -> None:
        """Raise PromptTooLong before tokenizing text that cannot fit."""
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
        if len(self.ids) > MAX_OVERFLOW * most:
            raise PromptTooLong.at(
                "messages",
                f"at least {len(self.ids)} tokens, but max_model_len is {most}",
                SHORTEN,
            )

    def _flush(self) -> None:
        run, seam = "".join(self._run), self._seam
        self._run.clear()
        self._seam = None
        self._check_fits(run)
        if not run:
            return
        ids, starts = self._tokenizer.encode_with_starts(run)
        if seam:
            num_before = next((i for i, start in enumerate(starts) if start >= seam), len(ids))
            self._trained_start = self._start + len(self.ids) + num_before
        self.ids.extend(ids)
        self._record(starts)

    def _record(self, starts: list[int]) -> None:
        """Record the index in the text of each token's first character, if a subclass needs it."""
