"""Supervised training uses the same packing and forward pass, on the assistant's tokens only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import making
import msgspec
import numpy as np
import pyarrow.parquet
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from sightline.algo.algorithms import load_sft_algorithm
from sightline.cli.main import main
from sightline.config import SftFile
from sightline.envs import load_environment
from sightline.envs.color_codeword import LETTERS, ColorCodeword
from sightline.envs.protocol import EnvironmentMix
from sightline.errors import MediaError, MessageError
from sightline.media import MediaStore
from sightline.message import assistant, system, user
from sightline.run import RunDir
from sightline.trace import read_traces, write_traces
from sightline.trainer import loop, sft
from sightline.trainer.build import build, build_conversations, build_pixels
from sightline.trainer.conversations import Demonstrations, TrainingConversation
from sightline.trainer.learner import Learner
from sightline.view.dashboard.run_view import RunView
from sightline.view.events import by_step, read_events
from sightline.wire.event import Event


def config_of(model: Path, folder: Path, **sections: dict[str, Any]) -> SftFile:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "sft": {"output_dir": str(folder / "out"), "batch_size": 4},
        "run": {"steps": 6},
        "media": {"root": str(folder / "media")},
        "trainer": {"lr": 1e-2, "device": "cpu", "checkpoint_every": 2, "stall_timeout_s": 0},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return SftFile.model_validate(values)


def made(config: SftFile, folder: Path) -> loop.TrainerComponents:
    run_dir = RunDir(folder)
    run_dir.make()
    return build(config, run_dir)


def conversations(config: SftFile) -> tuple[Learner, sft.ConversationBatches]:
    """Return the batches of a run, and the learner for them."""
    store = MediaStore(Path(config.media.root))
    learner = making.build_learner(
        config.model, config.trainer, store, 1, algorithm=load_sft_algorithm(config.algorithm)
    )
    return learner, build_conversations(config, learner, build_pixels(learner, store))


def events(folder: Path, kind: str) -> dict[int, Event]:
    return by_step(read_events(folder / "metrics.jsonl"), kind)


@pytest.fixture
def warmup(tiny_model: Path, tmp_path: Path) -> SftFile:
    env = {"name": "color_codeword", "args": {"spelled_fraction": 0.0}}
    return config_of(tiny_model, tmp_path, env=env)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Write a file of ten conversations, with one image for each next to it."""
    import random

    path = tmp_path / "talks.jsonl"
    lines = []
    for i in range(10):
        making.image(random.Random(i), 64, 64).save(tmp_path / f"{i}.png")
        talk = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is"}]},
            {"role": "assistant", "content": "AB C"[i % 3 :]},
        ]
        lines.append(json.dumps({"messages": talk, "images": [f"{i}.png"]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_trained_demonstrations_reveal_no_colours(warmup: SftFile, tmp_path: Path) -> None:
    """The letters that the warm-up trains on are right no more often than by chance."""
    _, batches = conversations(warmup)
    env = ColorCodeword(spelled_fraction=0.0)
    right = total = 0
    for i in range(300):
        conversation = batches.source.conversation(i, "train")
        sample = sft.build_sample(
            conversation.messages, batches.renderer, conversation.name, conversation.tools
        )
        text = batches.renderer.decode(sample.token_ids.numpy()[sample.trained.numpy()].tolist())
        last = text.replace("<|im_end|>", " ").split()[-1]
        truth = [letter for letter, _ in env.task(i, "sft").data]
        right += sum(a == b for a, b in zip(last, truth, strict=True))
        total += 3
    assert abs(right / total - 1 / len(LETTERS)) < 0.04


def test_mixed_demonstrations_offer_their_environments_tools(
    store: MediaStore,
) -> None:
    walk = load_environment("grid_walk:GridWalk", {"actions": "tool"})
    mix = EnvironmentMix([(walk, 1.0), (load_environment("counting:Counting", {}), 1.0)])
    demonstrations = Demonstrations(mix, store, seed=0)
    tools = {
        mix.choose_environment(i, "sft")[0].name: demonstrations.conversation(i, "train").tools
        for i in range(16)
    }
    assert walk.tools is not None
    assert tools == {"grid_walk": walk.tools, "counting": None}


def test_only_assistant_tokens_are_trained(warmup: SftFile, tmp_path: Path) -> None:
    _, batches = conversations(warmup)
    talk = [system("be brief"), user("red"), assistant("A B"), user("blue"), assistant("C")]
    sample = sft.build_sample(talk, batches.renderer, "s")
    trained = batches.renderer.decode(sample.token_ids.numpy()[sample.trained.numpy()].tolist())
    assert trained == "A B<|im_end|>C<|im_end|>"
    with pytest.raises(MessageError, match="s: the assistant says nothing"):
        sft.build_sample([user("red")], batches.renderer, "s")


def test_some_conversations_are_stored_as_trained(talks: Path, tiny_model: Path) -> None:
    config = config_of(tiny_model, talks.parent, data={"path": str(talks)})
    run_dir = RunDir(talks.parent / "run")
    run_dir.make()
    _, batches = conversations(config)
    batches.run_dir = run_dir
    list(batches)
    assert sorted(run_dir.traces.iterdir()) == [run_dir.traces_of(step) for step in (1, 2, 4)]
    for i, trace in enumerate(read_traces(run_dir.traces_of(2))):
        conversation = batches.source.conversation(4 + i, "train")
        sample = sft.build_sample(
            conversation.messages, batches.renderer, conversation.name, conversation.tools
        )
        path = trace.path(len(trace.nodes) - 1)
        assert trace.tokens(path) == sample.token_ids.numpy().tolist()
        assert [slot.item.key for slot in trace.slots(path)] == [sample.items[0].key]
    view = RunView("run", run_dir)
    view.refresh_all()
    assert view.overview()["rollouts"] == 12
    view.close()


def test_sft_loss_is_the_mean_negative_logprob(
    tiny_model: Path, talks: Path, tmp_path: Path
) -> None:
    """Compare with transformers' own model, with the images, one conversation at a time."""
    from transformers import AutoModelForImageTextToText

    config = config_of(tiny_model, tmp_path, data={"path": str(talks)}, run={"steps": 1})
    learner, batches = conversations(config)
    family: Any = learner.family
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float64)
    total, num = 0.0, 0
    for i in range(4):
        conversation = batches.source.conversation(i, "train")
        sample = sft.build_sample(conversation.messages, batches.renderer, conversation.name)
        ids = torch.from_numpy(sample.token_ids.numpy().astype(np.int64))[None]
        [item] = sample.items
        image = batches.preparer.pixels.materializer.store.image(item.ref)
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                pixel_values=torch.from_numpy(family.rows(family.patches(image, item))).double(),
                image_grid_thw=torch.tensor([item.grid]),
                mm_token_type_ids=torch.isin(ids, torch.tensor(family.slot_token_ids)).int(),
            ).logits[0]
        logits[:, list(learner.pad_ids)] = float("-inf")
        trained = sample.trained.numpy().astype(np.int64)
        logs = torch.log_softmax(logits[trained - 1], dim=-1)
        total -= float(logs[torch.arange(len(trained)), ids[0][trained]].sum())
        num += len(trained)
    loop.run(made(config, tmp_path / "run"))
    got = events(tmp_path / "run", "sft")[1].values
    assert got["loss"] == pytest.approx(total / num, rel=1e-5)
    assert got["trained_tokens"] == num and got["images"] == 4
    left_s = (got["steps_total"] - 1) * (got["seconds"] + got["waited_s"])
    assert got["eta_s"] == pytest.approx(left_s)


@pytest.fixture
def pairs(tmp_path: Path, talks: Path) -> Path:
    """Write the questions of `talks` with a better and a worse answer."""
    path = tmp_path / "pairs.jsonl"
    lines = []
    for line in talks.read_text().splitlines():
        row = json.loads(line)
        answers = [[{"role": "assistant", "content": answer}] for answer in "AC"]
        row |= {"prompt": row.pop("messages")[:1], "chosen": answers[0], "rejected": answers[1]}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_dpo_learns_to_prefer_the_better_conversation_of_each_pair(
    tiny_model: Path, pairs: Path, tmp_path: Path
) -> None:
    columns = {"messages_column": "chosen", "rejected_column": "rejected"}
    config = config_of(
        tiny_model,
        tmp_path,
        data={"path": str(pairs), "eval_fraction": 0.2, **columns},
        algorithm={"name": "dpo"},
        run={"steps": 16},
        sft={"batch_size": 8},
    )
    loop.run(made(config, tmp_path / "run"))
    steps = [event.values for event in events(tmp_path / "run", "sft").values()]
    assert steps[0]["dpo_loss"] == pytest.approx(np.log(2), rel=1e-4), "the policy is the reference"
    assert steps[-1]["dpo_loss"] < 0.5 and steps[-1]["preference_accuracy"] > 0.9
    first, last = (event.values["loss"] for event in events(tmp_path / "run", "sft_eval").values())
    assert last < first, "the better held-out answers become likelier"
    assert steps[0]["images"] == 16, "the same eight, twice"
    _, batches = conversations(config)
    train, held_out = (batches._prepare(1, range(2), split) for split in ("train", "eval"))
    assert train.num_samples == 4 and held_out.num_samples == 2


def test_pair_that_a_batch_draws_twice_is_two_groups(
    tiny_model: Path, pairs: Path, tmp_path: Path
) -> None:
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[:2]))
    config = config_of(
        tiny_model,
        tmp_path,
        data={"path": str(pairs), "messages_column": "chosen", "rejected_column": "rejected"},
        algorithm={"name": "dpo"},
        run={"steps": 2},
        sft={"batch_size": 3},
    )
    _, batches = conversations(config)
    rollouts = batches._prepare(1, range(3), "train").rollouts
    assert rollouts is not None
    assert [group.rewards.rewards.tolist() for group in rollouts.groups] == [[1.0, 0.0]] * 3
    loop.run(made(config, tmp_path / "run"))
    steps = [event.values for event in events(tmp_path / "run", "sft").values()]
    assert [values["samples"] for values in steps] == [6, 6]


def test_best_and_worst_rollouts_of_each_group_train_by_dpo(
    tiny_model: Path, talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `sightline samples --pairs` and train on what it writes."""
    _, batches = conversations(config_of(tiny_model, tmp_path, data={"path": str(talks)}))
    run_dir = RunDir(tmp_path / "rl")
    run_dir.make()
    run_dir.config.touch()
    store, traces = MediaStore(run_dir.media), []
    for group, rewards in enumerate(((0.0, 1.0, 0.5), (0.75, 0.75), (0.5, 0.75), (-1.0, 3.0))):
        ref = store.put(tmp_path / f"{group}.png")
        shared = [system("spell"), user(ref, "what is"), assistant("well"), user("go on")]
        for i, reward in enumerate(rewards):
            talk = TrainingConversation(f"g{group}.{i}", [*shared, assistant("ABC"[i])])
            trace = sft.build_trace(talk, batches.renderer, group)
            traces.append(msgspec.structs.replace(trace, group_id=f"g{group}", reward=reward))
    lost = msgspec.structs.replace(traces[0], id="g0.3", reward=9.0, error="lost")
    write_traces(run_dir.traces_of(1), [*traces, lost])
    words = ["samples", str(run_dir.path), "--pairs", "--min-gap", "0.5"]
    assert main([*words, "--to", str(tmp_path / "pairs")]) == 0
    assert "step_000001.parquet: 2 pairs, 2 images" in capsys.readouterr().out
    assert main([*words, "--to", str(tmp_path / "none"), "--min-gap", "5"]) == 2
    assert main(words) == 2 and main([*words, "--to", "x", "--best", "1"]) == 2
    assert not Path("x").exists() and not run_dir.samples.exists()

    columns = {"messages_column": "chosen", "rejected_column": "rejected"}
    config = config_of(
        tiny_model,
        tmp_path,
        data={"path": str(tmp_path / "pairs"), **columns},
        algorithm={"name": "dpo"},
        run={"steps": 2},
        sft={"batch_size": 2},
    )
    _, batches = conversations(config)
    for number, (group, best, worst) in enumerate(((0, "B", "A"), (3, "B", "A"))):
        row = batches.source.row(number)
        assert row.rejected is not None and row.messages[:-1] == row.rejected[:-1]
        assert [message.text for message in row.messages[2:]] == ["well", "go on", best]
        assert list(row.messages[1].images) == [store.put(tmp_path / f"{group}.png")]
        assert row.rejected[-1].text == worst
    row_of_file = pyarrow.parquet.read_table(
        tmp_path / "pairs" / "step_000001.parquet"
    ).to_pylist()[1]
    assert (row_of_file["chosen_reward"], row_of_file["rejected_reward"]) == (3.0, -1.0)
    assert [len(json.loads(row_of_file[name])) for name in ("prompt", "chosen", "rejected")] == [
        4,
        1,
        1,
    ]
    loop.run(made(config, tmp_path / "run"))
    steps = [event.values for event in events(tmp_path / "run", "sft").values()]
    assert steps[0]["dpo_loss"] == pytest.approx(np.log(2), rel=1e-4)
    assert steps[1]["dpo_loss"] < steps[0]["dpo_loss"]


def test_dpo_and_pairs_need_one_another(tiny_model: Path, pairs: Path, tmp_path: Path) -> None:
    data = {"path": str(pairs), "messages_column": "chosen"}
    for sections in (
        {"data": data, "algorithm": {"name": "dpo"}},
        {"data": {**data, "rejected_column": "rejected"}},
    ):
        with pytest.raises(ValidationError, match="rejected_column is"):
            config_of(tiny_model, tmp_path, **sections)


def test_held_out_conversations_are_evaluated_and_never_trained(
    tiny_model: Path, talks: Path, tmp_path: Path
) -> None:
    data = {"path": str(talks), "eval_fraction": 0.5}
    config = config_of(tiny_model, tmp_path, data=data, sft={"eval_every": 2, "batch_size": 3})
    learner, batches = conversations(config)
    assert batches.source.num_held_out == 5
    loop.run(made(config, tmp_path / "run"))
    evaluations = events(tmp_path / "run", "sft_eval")
    assert list(evaluations) == [0, 2, 4, 6]
    losses = [event.values["loss"] for event in evaluations.values()]
    assert losses[-1] < losses[0]
    assert len({event.values["trained_tokens"] for event in evaluations.values()}) == 1
    # Step through the first epoch manually: all five rows, in any batches.
    sums = [learner.evaluate(ready) for ready in batches.held_out(0)]
    assert len(sums) == 2
    mean = sum(nll for nll, _ in sums) / sum(num for _, num in sums)
    assert losses[0] == pytest.approx(mean, rel=1e-6)


def test_resumed_sft_run_is_bit_identical_to_an_uninterrupted_one(
    tiny_model: Path, talks: Path, tmp_path: Path
) -> None:
    data = {"path": str(talks), "eval_fraction": 0.2}
    whole = config_of(tiny_model, tmp_path, data=data, sft={"output_dir": str(tmp_path / "whole")})
    loop.run(made(whole, tmp_path / "a"))
    broken = whole.model_copy(
        update={"sft": whole.sft.model_copy(update={"output_dir": str(tmp_path / "two")})}
    )
    parts = made(broken, tmp_path / "b")

    class Killed(Exception):
        pass

    def until(step: int):  # type: ignore[no-untyped-def]
        for ready in feed:
            if ready.step > step:
                raise Killed
            yield ready
            assert not parts.learner.watchdog.activity, "waiting for a batch is no activity"

    feed, parts.feed = parts.feed, until(5)
    with pytest.raises(Killed):
        loop.run(parts)
    # A killed process ends with all its threads.
    parts.run_writer.saver.background_task.wait()
    second = made(broken, tmp_path / "b")
    assert second.first_step == 4, "the checkpoint of step 4 is the last, and step 5 is lost"
    loop.run(second)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sorted(events(tmp_path / "b", "sft")) == [1, 2, 3, 4, 5, 6]


def test_row_with_a_bad_image_drops_only_itself(
    tiny_model: Path, talks: Path, tmp_path: Path
) -> None:
    (tmp_path / "3.png").write_bytes(b"no image")
    (tmp_path / "7.png").unlink()
    budget = {"max_bad_fraction": 0.2}
    sections: dict[str, Any] = {
        "data": {"path": str(talks)},
        "sft": {"batch_size": 10},
        "run": {"steps": 1},
    }
    config = config_of(tiny_model, tmp_path, **sections, media=budget)
    loop.run(made(config, tmp_path / "run"))
    values = events(tmp_path / "run", "sft")[1].values
    assert values["samples"] == 8 and values["bad"] == {"MediaRefused": 1, "MediaError": 1}
    lost = [
        e.values for e in read_events(tmp_path / "run" / "metrics.jsonl") if e.kind == "bad_media"
    ]
    assert {event["sample"].partition(" draw ")[0] for event in lost} == {"row 3", "row 7"}
    assert all(str(talks) in event["problem"] for event in lost)
    for change in ({"max_bad_fraction": 0.1}, {"max_bad_fraction": 0.0}):
        strict = config_of(tiny_model, tmp_path, **sections, media=budget | change)
        with pytest.raises(MediaError, match="row"):
            loop.run(made(strict, tmp_path / "strict"))
