"""Branches to samples."""

from __future__ import annotations

import pytest

from sightline.errors import Misaligned
from sightline.message import user
from sightline.trace import PolicySpan, Trace, flatten
from sightline.trace.node import ROOT
from tests.unit.trace.toy import END, ToyRenderer, digests, picture, say, talk

TOY = ToyRenderer()


def test_a_path_becomes_one_sample_with_all_its_turns() -> None:
    trace = Trace(id="t", group_id="g", env="e", reward=0.5, temperature=0.7)
    turn = trace.extend(ROOT, [user(picture(1), picture(2), picture(1))], TOY)
    versions = [PolicySpan(0, 1, version=3, epoch=0), PolicySpan(1, 3, version=4, epoch=0)]
    first = turn.commit([150, 151, END], [-1, -2, -3], versions, "stop", digests(turn.slots))
    last = say(trace.extend(first.id, [user(picture(2))], TOY), "b", version=4)
    (sample,) = flatten(trace, lambda node: 1.0 if node is first else -1.0)
    ids = trace.tokens(trace.path(last.id))
    assert (sample.trace_id, sample.group_id, sample.env) == ("t", "g", "e")
    assert (sample.reward, sample.temperature) == (0.5, 0.7)
    assert sample.token_ids.numpy().tolist() == ids
    assert [ids[i] for i in sample.trained.numpy()] == [150, 151, END, 198, END]
    assert sample.logprobs.numpy().tolist() == [-1, -2, -3, -0.5, -1]
    assert sample.advantages.numpy().tolist() == [1, 1, 1, -1, -1]
    assert sample.versions.numpy().tolist() == [3, 4, 4, 4, 4]
    assert [item.ref for item in sample.items] == [picture(1), picture(2)]
    assert [slot.item for slot in sample.slots] == [0, 1, 0, 1]
    assert [slot.pixel_digest for slot in sample.slots] == digests(trace.slots(trace.path(last.id)))
    assert [(s.node, s.stop - s.start) for s in sample.segments] == [(first.id, 3), (last.id, 2)]


def forked() -> tuple[Trace, list[int]]:
    """Return a trace of two turns, with a longer alternative to the second answer."""
    trace = Trace(id="t", reward=1.0)
    first = talk(trace, ([user("hi")], "yes"))
    return trace, [first, *(talk(trace, ([user("go")], say), leaf=first) for say in ("a", "abc"))]


def test_a_shared_turn_trains_in_the_longest_branch_only() -> None:
    trace, (first, short, long) = forked()
    samples = flatten(trace, lambda node: 1.0)
    assert [[s.node for s in sample.segments] for sample in samples] == [[first, long], [short]]
    assert samples[1].token_ids.numpy().tolist() == trace.tokens(trace.path(short))


def test_turns_of_a_branch_keep_their_own_rewards() -> None:
    """Turns are counted in the rollout, as the environment rewards them, not in the branch."""
    trace, (first, short, long) = forked()
    trace.per_turn = [1.0, 2.0, 3.0]
    samples = flatten(trace)
    assert [turn.id for turn in trace.turns] == [first, short, long]
    assert [sample.turn_rewards for sample in samples] == [trace.per_turn] * 2
    rewards = [sample.expand_turns(trace.per_turn).tolist() for sample in samples]
    lengths = {node.id: node.num_sampled for node in trace.turns}
    assert rewards == [[1.0] * lengths[first] + [3.0] * lengths[long], [2.0] * lengths[short]]


def test_turn_without_advantage_is_not_trained() -> None:
    trace, (first, short, long) = forked()
    (sample,) = flatten(trace, lambda node: None if node.id in (first, long) else 1.0)
    assert [s.node for s in sample.segments] == [short]
    (sample,) = flatten(trace, lambda node: 1.0 if node.id == first else None)
    assert sample.token_ids.numpy().tolist() == trace.tokens(trace.path(first))
    assert flatten(trace, lambda node: None) == []


def test_a_missing_reward_is_refused() -> None:
    trace, _ = forked()
    trace.reward = None
    with pytest.raises(Misaligned, match="has no reward"):
        flatten(trace, lambda node: 1.0)
