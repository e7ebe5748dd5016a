"""One, two and four ranks give the same results, in real processes with gloo, FSDP2 and ZMQ."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rank_steps import Found, check_equal, check_gradients, record_step
from shards import take_first

from sightline.trainer.probe import ImageSwapProbe

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
TYPES = [
    ("qwen_vl", {}),
    ("qwen_vl", {"type": "qwen2_5_vl"}),
    ("qwen_vl", {"type": "qwen3_vl_moe"}),
    ("kimi_k25", {}),
    ("glm_v", {}),
    # Padded rows.
    *(("anyvlm", {"type": kind}) for kind in take_first(["gemma4", "gemma3"], 1)),
]
IN_CI = [(TYPES[0], 2), (TYPES[-1], 2)]


def test_replayed_routes_match_one_rank(step: Callable[..., Found]) -> None:
    """A rank without a micro-batch has no routes, and joins the others."""
    model = TYPES[2]
    alone, together = step(*model, 1, "routes"), step(*model, 2, "routes")
    free = step(*model, 1)
    router = "model.language_model.layers.0.mlp.gate.weight"
    assert not torch.allclose(alone.gradients[router], free.gradients[router])
    check_gradients(alone, together)
    fraction = alone.metrics["differing_routes_fraction"]
    assert 0 < fraction == together.metrics["differing_routes_fraction"]
    divided = step(*model, 2, "routes", "context=2")
    check_equal(alone, divided)
    assert fraction == divided.metrics["differing_routes_fraction"]
    assert free.metrics["differing_routes_fraction"] is None


@pytest.mark.parametrize(
    ("family", "options", "size"),
    [
        pytest.param(*kind, size, marks=[] if (kind, size) in IN_CI else [pytest.mark.thorough])
        for kind in TYPES
        for size in (2, 4)
    ],
)
def test_loss_and_gradients_match_one_rank(
    step: Callable[..., Found], family: str, options: dict[str, str], size: int
) -> None:
    check_equal(step(family, options, 1), step(family, options, size))


@pytest.mark.parametrize(
    ("family", "options", "size", "words"),
    [
        ("qwen_vl", {}, 2, ()),  # several micro-batches, some without an image
        # One micro-batch, packed as trees.
        pytest.param("qwen_vl", {}, 4, ("one",), marks=pytest.mark.thorough),
        pytest.param("qwen_vl", {"type": "qwen3_vl_moe"}, 2, (), marks=pytest.mark.thorough),
        pytest.param("kimi_k25", {}, 2, (), marks=pytest.mark.thorough),
        pytest.param("glm_v", {}, 4, (), marks=pytest.mark.thorough),
        pytest.param("qwen_vl", {}, 2, ("frozen",), marks=pytest.mark.thorough),
        pytest.param("qwen_vl", {}, 2, ("recompute",), marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_divide_the_tokens_match_one_rank(
    step: Callable[..., Found],
    family: str,
    options: dict[str, str],
    size: int,
    words: tuple[str, ...],
) -> None:
    divided = step(family, options, size, "context=2", *words)
    check_equal(step(family, options, 1, *words), divided)
    assert {rank["context"] for rank in divided.ranks} == {2}


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["recompute", "compile"])
def test_alternative_block_implementations_give_the_same_gradients(
    step: Callable[..., Found], way: str
) -> None:
    plain = step("qwen_vl", {}, 1)
    other = step("qwen_vl", {}, 2, way)
    assert other.ways == {way}, "it did compute otherwise"
    check_gradients(plain, other)
    assert math.isclose(other.metrics["loss"], plain.metrics["loss"], rel_tol=1e-5, abs_tol=1e-7)


def test_ranks_compute_in_bfloat16_and_update_float32_masters(
    step: Callable[..., Found],
) -> None:
    plain, alone, together = (
        step("qwen_vl", {}, size, *words)
        for size, words in ((1, ()), (1, ("mixed",)), (2, ("mixed",)))
    )
    [whole] = plain.nbytes
    for mixed in (alone, together):
        assert sum(mixed.nbytes) == whole / 2
        assert all(t.dtype == torch.float32 for t in mixed.gradients.values())
        # bfloat16 has eight bits. A gradient computed in float32 would be equal in all of them.
        off = _relative(mixed.gradients, plain.gradients)
        assert 1e-4 < off < 0.1, off
        masters = {n: t for n, t in mixed.tensors.items() if n.startswith("after.master.")}
        for name, master in masters.items():
            published = mixed.tensors[name.replace("master.", "")]
            assert published.dtype == torch.bfloat16
            assert torch.equal(published, master.bfloat16()), name
            assert not torch.equal(published.float(), master), "bits that bfloat16 does not have"
    record_step(alone, together)
    assert _relative(together.gradients, alone.gradients) < 0.05


def _relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    off = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return math.sqrt(off / sum(float(g.square().sum()) for g in theirs.values()))


def test_lead_rank_gathers_the_scores_of_all_ranks(step: Callable[..., Found]) -> None:
    alone, together = step("qwen_vl", {}, 1), step("qwen_vl", {}, 2)
    assert [(t, n) for t, n, _ in together.scores] == [(t, n) for t, n, _ in alone.scores]
    for (_, _, ours), (_, _, theirs) in zip(together.scores, alone.scores, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_rank_holds_only_its_parameter_shard(step: Callable[..., Found]) -> None:
    [whole] = step("qwen_vl", {}, 1).nbytes
    for size in (2, 4):
        nbytes = step("qwen_vl", {}, size).nbytes
        assert sum(nbytes) == whole
        assert max(nbytes) < 1.1 * whole / size
        for rank in step("qwen_vl", {}, size).ranks:
            # Two decoder layers, two vision blocks, and the rest.
            assert rank["units"] == [True] * 5


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_each_image_is_processed_once_per_machine(step: Callable[..., Found], size: int) -> None:
    [alone] = step("qwen_vl", {}, 1).ranks
    together = step("qwen_vl", {}, size).ranks
    assert together[0]["made"] == alone["images"], "rank 0 looks at all of them"
    assert [rank["made"] for rank in together[1:]] == [0] * (size - 1), "they find them made"
    assert sum(rank["patches"] for rank in together) == alone["patches"]


@pytest.mark.thorough
def test_text_only_rank_is_unaffected_by_its_blank_image(
    step: Callable[..., Found],
) -> None:
    """A rank without images computes a blank image, which does not affect the result."""
    alone, together = step("qwen_vl", {}, 1, "with_text"), step("qwen_vl", {}, 2, "with_text")
    assert [rank["shows"] for rank in together.ranks] == [[True], [False]]
    check_gradients(alone, together)
    assert math.isclose(together.metrics["loss"], alone.metrics["loss"], rel_tol=1e-5)


@pytest.mark.thorough
def test_frozen_tower_is_unchanged_on_all_ranks(step: Callable[..., Found]) -> None:
    alone = step("qwen_vl", {}, 1, "frozen")
    together = step("qwen_vl", {}, 2, "frozen")
    assert not any("visual" in name for name in alone.gradients)
    check_gradients(alone, together)
    assert {rank["passes"][0] for rank in together.ranks} == {together.ranks[0]["passes"][0]}
    for result in (alone, together):
        assert sum(rank["kept"] for rank in result.ranks) >= alone.ranks[0]["images"] > 0
        # All images of the second step are cached, so no rank runs the tower.
        assert all(second < first for first, second in (rank["passes"] for rank in result.ranks))


def test_bad_image_drops_its_sample_on_all_ranks(step: Callable[..., Found]) -> None:
    """Loss, gradients and scores equal those of the batch without the sample."""
    without, lost = step("qwen_vl", {}, 1, "kept"), step("qwen_vl", {}, 2, "lost")
    assert [(t, n) for t, n, _ in lost.scores] == [(t, n) for t, n, _ in without.scores]
    assert len(without.scores) < len(step("qwen_vl", {}, 1).scores)
    assert math.isclose(lost.metrics["loss"], without.metrics["loss"], rel_tol=1e-5)
    check_gradients(without, lost)


def test_adapters_on_several_ranks_match_one_rank(step: Callable[..., Found]) -> None:
    """With a single micro-batch (`one`), one rank has images and the other has nothing."""
    alone, together = step("qwen_vl", {}, 1, "lora"), step("qwen_vl", {}, 2, "lora", "one")
    check_gradients(alone, together)
    assert all(".lora_" in name and bool(g.any()) for name, g in alone.gradients.items())
    assert any("visual" in name for name in alone.gradients)
    plain = step("qwen_vl", {}, 1)
    merged = {name for name in alone.tensors if name.startswith("after.")}
    assert merged == {name for name in plain.tensors if name.startswith("after.")}
    for name in merged:
        torch.testing.assert_close(together.tensors[name], alone.tensors[name], atol=2e-3, rtol=0)


def test_critic_and_several_updates_match_one_rank(step: Callable[..., Found]) -> None:
    """Two epochs of two minibatches, with advantages from the values of all ranks."""
    alone, together = step("qwen_vl", {}, 1, "critic"), step("qwen_vl", {}, 2, "critic")
    record_step(alone, together)
    assert [rank["updates"] for rank in alone.ranks + together.ranks] == [4] * 3
    assert together.gradients.keys() == alone.gradients.keys()
    assert any("value_head" in name for name in alone.gradients)
    assert _relative(together.gradients, alone.gradients) < 1e-4
    for name in ("loss", "value_loss", "grad_norm"):
        assert math.isclose(together.metrics[name], alone.metrics[name], rel_tol=1e-4), name


def check_probes(alone: Found, together: Found) -> None:
    """One rank and two ranks probe the same tokens with the same result."""
    probed, ours = alone.metrics["probe"], together.metrics["probe"]
    assert probed["tokens"] == ours["tokens"] > 0
    assert probed["change"] > 0 and probed["exchanged_kl"] > 0
    assert ours["noise"] <= probed["change"] / 1000
    for name in ("change", "exchanged_kl"):
        assert math.isclose(ours[name], probed[name], rel_tol=1e-5), name
    able = [rank["asked"] for rank in together.ranks if rank["asked"]]
    assert [rank["asked"] for rank in alone.ranks] == [min(able)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(*kind, marks=[pytest.mark.thorough] if i else [])
        for i, kind in enumerate(TYPES)
    ],
)
def test_rank_without_images_joins_the_probe(
    step: Callable[..., Found], family: str, options: dict[str, str]
) -> None:
    alone, together = (step(family, options, ranks, "probe", "one") for ranks in (1, 2))
    check_probes(alone, together)
    assert [rank["shows"] for rank in together.ranks] == [[True], [False]]


@pytest.mark.thorough
def test_probe_runs_on_the_rank_with_suitable_images(step: Callable[..., Found]) -> None:
    alone, together = (step("qwen_vl", {}, ranks, "probe") for ranks in (1, 2))
    check_probes(alone, together)
    assert [bool(rank["asked"]) for rank in together.ranks] == [False, True]


@pytest.mark.thorough
def test_probe_does_not_change_the_step_on_any_rank(step: Callable[..., Found]) -> None:
    plain, probed = step("qwen_vl", {}, 2), step("qwen_vl", {}, 2, "probe")
    assert plain.metrics["probe"] is None and probed.metrics["probe"] is not None
    assert plain.tensors.keys() == probed.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert torch.equal(tensor, probed.tensors[name]), name


@pytest.mark.thorough
def test_blind_training_is_reported_on_ranks(step: Callable[..., Found]) -> None:
    for size in (1, 2):
        swap_probe = ImageSwapProbe(**step("qwen_vl", {}, size, "probe", "blind").metrics["probe"])
        assert swap_probe.is_blind and swap_probe.words.startswith("Blind: swapping the images")
