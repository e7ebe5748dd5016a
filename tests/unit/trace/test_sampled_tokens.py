"""Answers keep the sampled tokens, in a real chat format."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.trace import PolicySpan, Trace


@pytest.mark.parametrize("way", ["prepare", "extend"])
def test_sampled_tokens_are_kept_over_an_equally_long_encoding(
    tiny_model: Path, store: MediaStore, way: str
) -> None:
    renderer = load_renderer(tiny_model, store)
    of = {renderer.decode([token]): token for token in range(renderer.vocab_size)}
    usual, sampled = [of["as"], of["i"]], [of["a"], of["si"]]
    rendered = renderer.render([user("Go."), assistant("asi")], generation_prompt=False).token_ids
    assert usual == [token for token in rendered if token in usual], "what a tokenizer makes of it"
    stop = renderer.stop_token_ids[0]
    trace = Trace(id="t")
    turn = trace.prepare([user("Go.")], renderer)
    completion = [*sampled, stop]
    node = turn.commit(completion, [-1.0] * 3, [PolicySpan(0, 3, version=0, epoch=0)], "stop")
    assert node.message.text == "asi"
    if way == "prepare":
        following = trace.prepare([user("Go."), assistant("asi"), user("More.")], renderer)
    else:
        following = trace.extend(node.id, [user("More.")], renderer)
    tokens = [*turn.prompt_ids, *completion]
    assert following.prompt_ids[: len(tokens)] == tokens
    following.commit([stop], [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop")
    [branch] = trace.branches()
    assert trace.tokens(branch) == [*following.prompt_ids, stop]
