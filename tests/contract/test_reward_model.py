"""Reward models on our engine: transformers' rewards, as a reward of the dataset environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import Client, Reference, live
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
)

from sightline.compute.model import load_model
from sightline.config import LoraConfig, ModelConfig
from sightline.envs.rewards import build_reward
from sightline.errors import FamilyError, JudgeFailed
from sightline.families import load_family, load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import Message, assistant, user
from sightline.trainer.policy import load_policy

TOLERANCE = 1e-5
PICTURE = Image.effect_noise((96, 64), 50).convert("RGB")
TALK = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]


def write_text_model(path: Path) -> Path:
    """Write a sequence classification checkpoint, whose head replaces the language model's."""
    write_tiny("llama3", path, seed=0)
    config = AutoConfig.from_pretrained(path)
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def write_vision_model(path: Path, labels: int = 1) -> Path:
    write_tiny("qwen_vl", path, seed=0)
    weights = load_file(path / "model.safetensors")
    width = AutoConfig.from_pretrained(path).text_config.hidden_size
    head = torch.randn(labels, width, generator=torch.Generator().manual_seed(0))
    save_file({**weights, "score.weight": head}, path / "model.safetensors", {"format": "pt"})
    return path


def serve(path: Path, media: MediaStore, **options: Any) -> Any:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, **options}
    return live(ServerSpec.of(path=path, media_roots=(media.root,), **settings))


def rate(client: Client, messages: list[dict[str, Any]]) -> float:
    body = json.dumps({"messages": messages}).encode()
    status, answer, _ = client.call("POST", "/v1/reward", body)
    assert status == 200, answer
    return float(json.loads(answer)["reward"])


def refuse(client: Client, path: str, body: dict[str, Any]) -> str:
    """Return the message of the error that answers a request."""
    status, answer, _ = client.call("POST", path, json.dumps(body).encode())
    assert status == 400
    return str(json.loads(answer)["error"]["message"])


def test_rewards_of_text_are_those_of_transformers(tmp_path: Path, media: MediaStore) -> None:
    path = write_text_model(tmp_path / "model")
    longer = [*TALK, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}]
    renderer = load_renderer(path, media)
    peer = AutoModelForSequenceClassification.from_pretrained(path)
    with serve(path, media, prefill_chunk_tokens=7) as client:
        for talk in (TALK, longer, TALK):
            ids = renderer.render(talk, generation_prompt=False).token_ids
            [expected] = peer(torch.tensor([ids])).logits[0].tolist()
            assert rate(client, talk) == pytest.approx(expected, abs=TOLERANCE)
        refusal = refuse(client, "/v1/chat/completions", {"messages": TALK})
        assert "samples no text" in refusal and "/v1/reward" in refusal


def test_rewards_of_images_are_those_of_transformers(tmp_path: Path, media: MediaStore) -> None:
    path = write_vision_model(tmp_path / "model")
    ref, reference = media.put(PICTURE), Reference(path, media)
    talk = [user(ref, "What is it?"), assistant("A cat.")]
    rendered = reference.renderer.render(talk, generation_prompt=False)
    # The head of transformers' model, as logits of its last token.
    weight = load_file(path / "model.safetensors")["score.weight"]
    reference.model.lm_head.weight = torch.nn.Parameter(weight)
    expected = float(reference.logits(rendered.token_ids, rendered.slots)[-1])
    sent = [{"type": "image_url", "image_url": {"url": ref.data_url(media.get(ref))}}]
    asked = {"role": "user", "content": [*sent, {"type": "text", "text": "What is it?"}]}
    with serve(path, media) as client:
        found = rate(client, [asked, TALK[1]])
    assert found == pytest.approx(expected, abs=TOLERANCE)


class Rollout:
    """The parts of a rollout's chat that a reward reads."""

    def __init__(self, media: MediaStore, history: list[Message]) -> None:
        self.history, self.get = history, media.get


def test_reward_of_a_rollout_is_asked_once(tmp_path: Path, media: MediaStore) -> None:
    path = write_vision_model(tmp_path / "model")
    talk = [user(media.put(PICTURE), "What is it?"), assistant("A cat.")]
    other = [*talk[:1], assistant("A dog.")]

    async def ask(reward: Any, *talks: list[Message]) -> list[float]:
        return await asyncio.gather(
            *(reward("an answer", None, {}, Rollout(media, history)) for history in talks)
        )

    with serve(path, media) as client:
        url = {"base_url": f"http://{client.host}:{client.port}/v1"}
        reward = build_reward("reward_model", url)
        first, again, different = asyncio.run(ask(reward, talk, list(talk), other))
        assert first == again != different
        assert client.totals()["requests"] == 2
    failing = build_reward("reward_model", url | {"tries": 1})
    with pytest.raises(JudgeFailed, match="failed 1 times"):
        asyncio.run(ask(failing, talk))


def test_language_model_gives_no_rewards(tiny_model: Path, media: MediaStore) -> None:
    params = {"max_tokens": 2, "reward": True}
    with serve(tiny_model, media) as client:
        assert "no reward head" in refuse(client, "/v1/reward", {"messages": TALK})
        body = {"token_ids": [5, 6], "sampling_params": params}
        assert "max_tokens: 2" in refuse(client, "/inference/v1/generate", body)


def test_head_with_several_labels_is_refused(tmp_path: Path) -> None:
    path = write_vision_model(tmp_path / "model", labels=2)
    with pytest.raises(FamilyError, match=r"\[2, 64\], but a reward has \[1, 64\]"):
        load_model(path, load_family(path), "cpu", "float32")


def test_reward_model_is_no_policy(tmp_path: Path) -> None:
    """Its language model head has random values, or none."""
    path = write_text_model(tmp_path / "model")
    with pytest.raises(FamilyError, match="reward model"):
        load_policy(ModelConfig(path=str(path)), LoraConfig(), 0, load_family(path), "cpu")
