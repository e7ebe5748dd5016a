"""Ids that a request bans leave the distribution, for itself alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import GREEDY, Client, Reference, Together, live

from sightline.inference.settings import ServeSettings
from sightline.media import MediaStore
from sightline.message import user
from sightline.wire.generate import SamplingParams


@pytest.fixture
def client(tiny_model: Path, store: MediaStore) -> Iterator[Client]:
    settings = ServeSettings(
        model=tiny_model, media_roots=(store.root,), device="cpu", max_rows=8, max_len=512
    )
    with live(settings) as made:
        yield made


def test_banned_ids_leave_the_distribution_of_their_own_request(
    client: Client, tiny_model: Path, store: MediaStore
) -> None:
    reference = Reference(tiny_model, store)
    prompt = reference.renderer.render([user("What now?")]).token_ids
    free = client.generate(prompt).choices[0].token_ids
    banned = tuple(sorted(set(free)))
    params = SamplingParams(
        max_tokens=8, temperature=0.0, banned_token_ids=banned, prompt_logprobs=0
    )
    together = Together(client)
    both = [together.generate(prompt, (), p) for p in (params, GREEDY)]
    answer, unbanned = (one.result() for one in both)
    assert unbanned.choices[0].token_ids == free
    said = answer.choices[0].token_ids
    assert not set(said) & set(banned)
    logits = reference.logits([*prompt, *said], ())[len(prompt) - 1 : -1]
    logits[:, [*reference.renderer.pad_token_ids, *banned]] = float("-inf")
    assert said == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values.numpy()
    assert answer.choices[0].logprobs is not None
    found = [entry.logprob for entry in answer.choices[0].logprobs.content]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # A prompt's own tokens are scored under the same distribution; banned ones have no logprob.
    assert answer.prompt_logprobs is not None
    for token, entry in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True):
        assert (entry is None) == (token in (*banned, *reference.renderer.pad_token_ids))
