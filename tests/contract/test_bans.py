"""Ids that a request bans leave the distribution, for itself alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import GREEDY, Client, Reference, Together, live

from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.wire.generate import GenerateResponse, SamplingParams


@pytest.fixture(scope="module")
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as made:
        yield made


@pytest.fixture(scope="module")
def reference(tiny_model: Path, media: MediaStore) -> Reference:
    return Reference(tiny_model, media)


def check_banned(
    reference: Reference, prompt: list[int], banned: tuple[int, ...], answer: GenerateResponse
) -> None:
    """The answer is the greedy one of the distribution without `banned`, with its logprobs."""
    said = answer.choices[0].token_ids
    logits = reference.logits([*prompt, *said], ())[len(prompt) - 1 : -1]
    logits[:, [*reference.renderer.pad_token_ids, *banned]] = float("-inf")
    assert said == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values.numpy()
    assert answer.choices[0].logprobs is not None
    found = [entry.logprob for entry in answer.choices[0].logprobs.content]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_banned_ids_leave_the_distribution_of_their_own_request(
    client: Client, reference: Reference
) -> None:
    """Side by side, of different lengths: rows of the batch move when others end."""
    prompt = reference.renderer.render([user("What now?")]).token_ids
    free = client.generate(prompt).choices[0].token_ids
    bans = [(), tuple(free), (free[0],), (), (free[0], free[1]), ()]
    together = Together(client)
    answers = [
        together.generate(
            prompt, (), SamplingParams(max_tokens=3 + 7 * i, temperature=0.0, banned_token_ids=ban)
        )
        for i, ban in enumerate(bans)
    ]
    for ban, answer in zip(bans, answers, strict=True):
        assert not set(answer.result().choices[0].token_ids) & set(ban)
        check_banned(reference, prompt, ban, answer.result())
    assert client.generate(prompt, (), GREEDY).choices[0].token_ids == free


@pytest.mark.torch_only("vLLM does not score prompts")
def test_prompts_are_scored_under_the_distribution_without_banned_ids(
    client: Client, reference: Reference
) -> None:
    prompt = reference.renderer.render([user("What now?")]).token_ids
    banned = tuple(sorted(set(client.generate(prompt).choices[0].token_ids)))
    params = SamplingParams(
        max_tokens=8, temperature=0.0, banned_token_ids=banned, prompt_logprobs=0
    )
    answer = client.generate(prompt, (), params)
    check_banned(reference, prompt, banned, answer)
    assert answer.prompt_logprobs is not None
    for token, entry in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True):
        assert (entry is None) == (token in (*banned, *reference.renderer.pad_token_ids))
