"""Guarantees of every family that supports videos.

1. Its tokens are those of the chat template, with videos as its processor writes them.
2. Each step has its own item and slot, and is never cut.
3. Positions and logits equal those of transformers for the whole video.
4. Packed results equal separate ones, and the engine's logprobs equal the trainer's.
5. Pixels that the sampler did not use do not train.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import making
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from serving import live, next_turn
from videos import encode_video, noise_frames

from sightline import FingerprintMismatch, MediaError, MediaRefused, MessageError, Misaligned
from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.inference.server_spec import ServerSpec
from sightline.message import Message, VideoPart, assistant, user, video
from sightline.pack import PackSize
from sightline.pack.truncate import truncate_sample
from sightline.pixels import Materializer
from sightline.render import Bridged
from sightline.trace import PolicySpan, Trace, flatten
from sightline.trace.node import ROOT
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.sft import build_sample
from sightline.wire import MediaItem, Slot
from sightline.wire.generate import SamplingParams
from sightline.wire.sample import Batch
from tests.contract.test_forward import ALONE, WHOLE, gradients, hidden, prepare

TIMES = (0.0, 0.4, 1.0, 2.5, 2.75)


def film(
    checkpoint: Any, count: int = 11, fps: int = 4, seed: int = 0, side: int = 96
) -> VideoPart:
    frames = noise_frames(count, side, 64, seed)
    return video(checkpoint.store.put(encode_video(frames, fps=fps)))


def slides(checkpoint: Any, count: int = 5, seed: int = 0, pace: float = 1.0) -> VideoPart:
    """A list of images with their times."""
    frames = noise_frames(count, 64, 64, seed + 100)
    refs = [checkpoint.store.put(Image.fromarray(frame)) for frame in frames]
    return video([(ref, pace * time) for ref, time in zip(refs, TIMES, strict=False)])


@pytest.fixture
def videos(filming: Any) -> list[VideoPart]:
    return [film(filming), slides(filming), film(filming, 40, 10, 1), slides(filming, 2)]


def joins_steps(family: Any) -> bool:
    """Return whether a video's steps are adjacent, with positions from their times."""
    return getattr(family, "joins_steps", False)


# -- tokens


def written(checkpoint: Any, part: VideoPart) -> str:
    """Return the text that transformers' processor writes for a video pad.

    It uses only the class, since a whole processor needs torchvision: see tests/processors.
    """
    from transformers.video_utils import VideoMetadata

    family = checkpoint.family
    steps = family.steps(part)
    _, height, width = steps[0].item.grid
    if part.ref is None:  # as if there were a frame every hundredth of a second
        indices, fps = [round(100 * frame.seconds) for frame in part.frames], 100.0
    else:
        frames = [n for shown in steps for n in shown.item.step.frames]
        indices, fps = frames[: steps[0].item.step.num_frames], part.ref.fps
    inputs = {
        "video_grid_thw": torch.tensor([[len(steps), height, width]]),
        "video_metadata": [VideoMetadata(1, fps=fps, frames_indices=indices)],
    }
    return checkpoint.case.write_video(family, inputs)


def template_ids(checkpoint: Any, messages: list[Message], template: str | None) -> list[int]:
    """Render with the template. A video's marks go with the pad, as in the processor published
    with Qwen3-VL. Later ones leave them around a video that has marks of its own."""
    forms, parts = [], []
    for message in messages:
        content = []
        for part in message.content:
            if isinstance(part, VideoPart):
                parts.append(part)
            is_video = isinstance(part, VideoPart)
            kind = {"type": "video"} if is_video else {"type": "text", "text": part.text}
            content.append(kind)
        forms.append({"role": message.role, "content": content})
        if message.role == "assistant":
            forms[-1]["content"] = message.text
    tokenizer = checkpoint.transformers_tokenizer
    text = tokenizer.apply_chat_template(
        forms,
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
        **checkpoint.case.template_settings(()),
    )
    for part in parts:
        head, mark, tail = text.partition(checkpoint.case.video_mark)
        assert mark
        text = head + written(checkpoint, part).replace("<|video_pad|>", "\0") + tail
    ids: list[int] = tokenizer(text.replace("\0", "<|video_pad|>"))["input_ids"]
    return ids


def test_tokens_match_the_template(filming: Any, videos: list[VideoPart]) -> None:
    published = filming.case.published_template
    templates = [None]
    if published is not None and published.is_file():
        templates.append(published.read_text())
    answer = assistant("a")
    for talk in (
        [user("see ", videos[0], videos[1], "\nso? ")],
        [user(videos[2]), answer, user(" and ", videos[3])],
    ):
        for template in templates:
            rendered = filming.renderer.render(talk)
            assert rendered.token_ids == template_ids(filming, talk, template)


def test_video_bridge_matches_a_full_rendering(filming: Any, videos: list[VideoPart]) -> None:
    renderer = filming.renderer
    role = "tool" if filming.case.wants_query or filming.case.takes_reasoning else "user"
    new = Message(role, user("and ", videos[1], "?").content)
    first = [user("see ", videos[0])]
    answer = assistant("ok", reasoning=filming.case.sampled_reasoning)
    prompt = renderer.render(first)
    whole = renderer.render([*first, answer, new])
    rendered = renderer.render([*first, answer], generation_prompt=False).trained[-1]
    completion = whole.token_ids[rendered.start : rendered.stop]
    assert prompt.token_ids == whole.token_ids[: rendered.start]
    bridged = renderer.bridge(prompt.token_ids, completion, [new])
    assert isinstance(bridged, Bridged)
    assert [*prompt.token_ids, *completion, *bridged.token_ids] == whole.token_ids
    assert [*prompt.slots, *bridged.slots] == whole.slots


def test_each_video_step_has_its_own_slot(filming: Any, videos: list[VideoPart]) -> None:
    family = filming.family
    for part in videos:
        rendered = filming.renderer.render([user("see ", part)])
        assert [slot.item for slot in rendered.slots] == [s.item for s in family.steps(part)]
        for number, slot in enumerate(rendered.slots):
            step = slot.item.step
            assert step is not None and step.number == number
            assert step.num_steps == len(rendered.slots)
            assert slot.item.grid[0] == 1 and slot.length == family.num_tokens(slot.item)
            pads = set(rendered.token_ids[slot.offset : slot.end])
            assert pads == {filming.renderer.video_pad_id}
            family.check_item(slot.item)


def test_steps_of_one_video_are_distinguished(filming: Any, videos: list[VideoPart]) -> None:
    items = [step.item for part in videos for step in filming.family.steps(part)]
    assert len({item.key for item in items}) == len(set(items)) == len(items)
    image = filming.family.item(filming.refs[0])
    assert image.key not in {item.key for item in items}


def test_video_item_round_trips_and_false_items_are_refused(
    filming: Any, videos: list[VideoPart]
) -> None:
    family = filming.family
    for part in videos[:2]:
        item = family.steps(part)[1].item
        assert MediaItem.from_raw(item.to_raw()) == item
        for change in (
            {"number": len(family.steps(part))},
            {"frames": (0, 9)} if part.ref else {"further": (filming.refs[4],)},
            # Limits per frame do not depend on the number of frames.
            *([] if joins_steps(family) and part.ref is None else [{"num_frames": 40_000}]),
        ):
            step = msgspec.structs.replace(item.step, **change)
            with pytest.raises(Misaligned):
                family.check_item(msgspec.structs.replace(item, step=step))
        with pytest.raises(Misaligned):
            family.check_item(msgspec.structs.replace(item, grid=(1, 2, 2)))
        with pytest.raises(FingerprintMismatch):
            family.check_item(msgspec.structs.replace(item, fingerprint=family.fingerprint))


def test_video_processor_setting_changes_only_the_step_fingerprint(
    filming: Any, tmp_path: Any
) -> None:
    import json
    import shutil

    folder = tmp_path / "other"
    shutil.copytree(filming.path, folder)
    file = folder / "video_preprocessor_config.json"
    changed = json.loads(file.read_text()) | json.loads(filming.case.video_setting)
    file.write_text(json.dumps(changed))
    other = load_family(folder)
    part = film(filming, 40, 4)
    assert other.fingerprint == filming.family.fingerprint
    tokens = [
        sum(family.num_tokens(step.item) for step in family.steps(part))
        for family in (other, filming.family)
    ]
    assert tokens[0] < tokens[1]
    with pytest.raises(FingerprintMismatch, match='"video": '):
        other.check_item(filming.family.steps(part)[0].item)


def test_unsupported_videos_are_refused_by_path(filming: Any, videos: list[VideoPart]) -> None:
    renderer = filming.renderer
    url = filming.refs[0].url
    with pytest.raises(MessageError, match=r"messages\[0\]\.content\[1\].* cannot show a video"):
        renderer.render([Message("assistant", user("a", videos[0]).content)])
    with pytest.raises(MessageError, match=r"messages\[0\]\.content\[0\].*expected a video"):
        renderer.render([{"role": "user", "content": [{"type": "video_url", "video_url": url}]}])
    one = video([(filming.refs[0], 0.0)])
    with pytest.raises(MediaRefused, match=r"messages\[0\]\.content\[1\].*1 frames"):
        renderer.render([user("a", one)])
    uneven = video([(filming.refs[0], 0.0), (filming.refs[1], 1.0)])
    with pytest.raises(MediaRefused, match=r"messages\[0\]\.content\[0\].*different sizes"):
        renderer.render([user(uneven)])


def test_truncation_cuts_between_video_steps(filming: Any, videos: list[VideoPart]) -> None:
    talk = [user("hi"), assistant("hm"), user("see ", videos[2]), assistant("fine, so it is")]
    sample = build_sample(talk, filming.renderer, "t")
    assert len(sample.slots) > 2
    for limit in range(sample.slots[0].offset, len(sample.token_ids)):
        cut = truncate_sample(sample, limit)
        if isinstance(cut, str):
            continue
        assert all(slot.end <= len(cut.token_ids) for slot in cut.slots)
        placed = [Slot(s.offset, s.length, cut.items[s.item]) for s in cut.slots]
        filming.family.positions(len(cut.token_ids), placed)


def test_every_step_trains_with_its_own_item(filming: Any, videos: list[VideoPart]) -> None:
    renderer, trace = filming.renderer, Trace(id="t", reward=1.0)
    turn = trace.extend(ROOT, [user(videos[0], "or", videos[1])], renderer)
    ids = [renderer.stop_token_ids[0]]
    turn.commit(ids, [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop")
    (sample,) = flatten(trace)
    assert len(sample.items) == len(turn.slots) > 2
    assert [sample.items[slot.item] for slot in sample.slots] == [s.item for s in turn.slots]


# -- against transformers


def transformers_logits(
    checkpoint: Any, model: Any, tokens: list[int], slots: list[Slot]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits and positions with transformers' own model, on whole videos."""
    family, store = checkpoint.family, checkpoint.store
    materializer = Materializer(family, store, 1 << 24)
    kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
    grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
    rows: dict[int, list[np.ndarray]] = {1: [], 2: []}
    seconds: list[float] = []
    for slot in slots:
        step = slot.item.step
        kind = 1 if step is None else 2
        kinds[0, slot.offset : slot.end] = kind
        rows[kind].append(family.rows(materializer.get(slot.item).patches))
        if step is None or step.number == 0:
            _, height, width = slot.item.grid
            grids[kind].append((1 if step is None else step.num_steps, height, width))
            seconds += [] if step is None else [step.seconds]
    arrays: dict[str, Any] = {}
    for kind, name, grid in ((1, "pixel_values", "image"), (2, "pixel_values_videos", "video")):
        if rows[kind]:
            arrays[name] = torch.from_numpy(np.concatenate(rows[kind]))
            arrays[f"{grid}_grid_thw"] = torch.tensor(grids[kind])
    timed = {"second_per_grid_ts": torch.tensor(seconds)} if joins_steps(family) else {}
    ids = torch.tensor([tokens])
    with torch.no_grad():
        out = model(input_ids=ids, mm_token_type_ids=kinds, **arrays, **timed).logits[0]
        grid_names = {name: value for name, value in arrays.items() if name.endswith("thw")}
        rope_positions, _ = model.model.get_rope_index(ids, kinds, **grid_names, **timed)
    materializer.close()
    return out, rope_positions[:, 0]


def test_video_logits_match_transformers(computing_videos: Any) -> None:
    """Though the tower is given a video step by step, and each step apart.

    Videos are so short that where steps are joined the text behind one is where transformers has
    it: see tests/unit/families/test_qwen_vl_video.py for longer ones.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        computing_videos.path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    forward = load_model(computing_videos.path, computing_videos.family, "cpu", "float32")
    images = computing_videos.refs[4:5] if computing_videos.case.mixes_media else []
    videos = film(computing_videos, side=168), slides(computing_videos, pace=0.1)
    rendered = computing_videos.renderer.render(
        [user("see ", videos[0], *images, videos[1], "so?")]
    )
    tokens, slots = rendered.token_ids, rendered.slots
    wanted, along = transformers_logits(computing_videos, model, tokens, slots)
    placed, _ = computing_videos.family.positions(len(tokens), slots)
    assert np.array_equal(placed, along.numpy())
    with torch.no_grad():
        ours = forward.logits(hidden_of(computing_videos, forward, tokens, slots))
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)


def hidden_of(checkpoint: Any, forward: Any, tokens: list[int], slots: list[Slot]) -> torch.Tensor:
    """Hidden states with the features of all slots in one pass of the tower."""
    materializer = Materializer(checkpoint.family, checkpoint.store, 1 << 24)
    parts = [materializer.get(slot.item).patches for slot in slots]
    width = max(part.shape[1] for part in parts)
    wide = [
        part if part.shape[1] == width else checkpoint.family.repeat_frame(part) for part in parts
    ]
    materializer.close()
    stacked = torch.from_numpy(np.concatenate(wide))
    features = forward.encode(stacked, [slot.item.grid for slot in slots])
    return hidden(checkpoint, forward, tokens, slots, features)


# -- trainer and engine


def test_packed_videos_match_separate_ones(computing_videos: Any) -> None:
    videos = [film(computing_videos, 5), slides(computing_videos), slides(computing_videos, 4)]
    forward = load_model(computing_videos.path, computing_videos.family, "cpu", "float32")
    for made in (
        making.samples(computing_videos.path, computing_videos.store, 4, 3, videos=videos),
        making.group(computing_videos.path, computing_videos.store, 4, 3, videos=videos),
    ):
        assert any(item.step for sample in made for item in sample.items)
        assert any(item.step is None for sample in made for item in sample.items)
        packed, alone = (prepare(computing_videos, made, limit) for limit in (WHOLE, ALONE))
        assert len(packed.micro_batches) < len(alone.micro_batches) == len(made)
        together = gradients(computing_videos, forward, packed)
        apart = gradients(computing_videos, forward, alone)
        floor = 1e-3 * max(float(gradient.norm()) for gradient in apart.values())
        for name, gradient in apart.items():
            size = max(float(gradient.norm()), floor)
            distance = float((gradient - together[name]).norm()) / size
            assert distance < computing_videos.case.gradient_tolerance, name


def test_engine_logprobs_match_one_forward_pass(computing_videos: Any) -> None:
    case, renderer = computing_videos.case, computing_videos.renderer
    forward = load_model(computing_videos.path, computing_videos.family, "cpu", "float32")
    settings = ServerSpec.of(
        path=computing_videos.path,
        media_roots=(computing_videos.store.root,),
        device="cpu",
        max_num_seqs=4,
        max_model_len=1024,
        prefill_chunk_tokens=23,
    )
    rendered = renderer.render([user("Look.", film(computing_videos, 5), computing_videos.refs[4])])
    tokens, slots = rendered.token_ids, rendered.slots
    with live(settings) as live_client:
        client = replace(live_client, modality=computing_videos.family.modality)
        for turn in range(2):
            params = SamplingParams(
                max_tokens=6, seed=turn, stop_token_ids=list(renderer.stop_token_ids)
            )
            answer = client.generate(tokens, slots, params)
            choice = answer.choices[0]
            assert choice.logprobs is not None and answer.sightline is not None
            token_ids = choice.token_ids
            materializer = Materializer(computing_videos.family, computing_videos.store, 1 << 24)
            digests = [materializer.get(slot.item).digest for slot in slots]
            assert answer.sightline.pixel_digests == digests
            with torch.no_grad():
                states = hidden_of(computing_videos, forward, [*tokens, *token_ids], slots)
                logits = forward.logits(states[len(tokens) - 1 : -1])
            logits[:, list(renderer.pad_token_ids)] = float("-inf")
            expected = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
            if turn == 1:
                assert answer.sightline.cached_tokens or computing_videos.family.packing != "tree"
            new = user("And?", slides(computing_videos))
            if case.wants_query:  # a question would rewrite history
                new = Message("tool", new.content)
            tokens, slots = next_turn(renderer, tokens, slots, token_ids, new)


def test_sample_with_a_changed_frame_pixel_does_not_train(filming: Any) -> None:
    """The sampler used another second frame: only the first step's digest differs."""
    frames = noise_frames(4, 64, 64, 7)
    flipped = frames.copy()
    flipped[1, 3, 5, 2] ^= 1
    part, other = (
        video(
            [
                (filming.store.put(Image.fromarray(frame)), t)
                for frame, t in zip(shown, TIMES, strict=False)
            ]
        )
        for shown in (frames, flipped)
    )
    materializer = Materializer(filming.family, filming.store, 1 << 24)
    digests = [
        [materializer.get(step.item).digest for step in filming.family.steps(shown)]
        for shown in (part, other)
    ]
    assert digests[0][0] != digests[1][0] and digests[0][1] == digests[1][1]
    sample = build_sample([user(part), assistant("a")], filming.renderer, "t")
    slots = [
        msgspec.structs.replace(slot, pixel_digest=digest)
        for slot, digest in zip(sample.slots, digests[1], strict=True)
    ]
    lying = msgspec.structs.replace(sample, slots=slots)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20))
    with pytest.raises(MediaError, match="PixelMismatch.*step 0 of video"):
        preparer.prepare(Batch(1, [lying]), digest="")
    materializer.close()


def test_video_file_is_decoded_once_for_all_steps(filming: Any) -> None:
    part = film(filming, 40, 4, seed=9)
    materializer = Materializer(filming.family, filming.store, 1 << 24)
    items = [step.item for step in filming.family.steps(part)]
    for item, flight in materializer.iterate(items, 1 << 24):
        patches = flight.result().patches
        assert patches.shape[0] == item.num_patches
        assert patches.nbytes == materializer.count_bytes(item), "the budget counts every frame"
    assert part.ref is not None
    assert materializer._videos._get(part.ref).num_starts == 1
    materializer.close()
