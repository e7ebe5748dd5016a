"""The engine's greedy answers equal transformers' on every tiny checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import picture
from serving import Client, live
from shards import take_first

from sightline.compute.model import load_model
from sightline.families import load_family, load_renderer, registry
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import user
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams

NUM_TOKENS = 24
CHECKPOINTS = [
    ("qwen_vl", {"type": "qwen2_5_vl"}),
    ("qwen_vl", {"type": "qwen3_vl_thinking"}),
    ("qwen_vl", {"type": "qwen3_vl_moe"}),
    ("qwen_vl", {"type": "qwen3"}),
    ("qwen_vl", {"type": "qwen3_moe"}),
    ("qwen_vl", {"type": "qwen3_5_moe"}),
    ("kimi_k25", {}),
    ("glm_v", {}),
    ("glm_v", {"type": "glm4v_moe"}),
    ("llama3", {}),
]
ELSEWHERE = {
    "qwen3_vl": "test_engine.py",
    "qwen3_5": "test_engine_recurrent.py",
    "qwen3_5_nonthinking": "test_engine_recurrent.py",
}
"""Types with their own test files."""


class Witness:
    """transformers' own `generate`, with its own attention and its own search for the images."""

    def __init__(self, path: Path, store: MediaStore) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.family = load_family(path)
        self.store = store
        auto = AutoModelForImageTextToText if self.family.shows_media else AutoModelForCausalLM
        self.model = auto.from_pretrained(path, local_files_only=True, attn_implementation="sdpa")
        self.rows: Any = load_model(path, self.family, "cpu", "float32")
        self.banned = list(load_renderer(path, store).pad_token_ids)

    @torch.no_grad()
    def says(self, tokens: list[int], slots: list[Slot]) -> list[int]:
        ids = torch.tensor([tokens])
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if slots:
            image_patches = [
                self.family.patches(self.store.image(s.item.ref), s.item) for s in slots
            ]
            rows = [self.rows.rows(torch.from_numpy(patches)) for patches in image_patches]
            inputs["pixel_values"] = torch.cat(rows)
            inputs["image_grid_thw"] = torch.tensor([slot.item.grid for slot in slots])
            if self.family.num_axes > 1:  # positions follow the images: it wants to know where
                kinds = torch.zeros_like(ids)
                for slot in slots:
                    kinds[0, slot.offset : slot.end] = 1
                inputs["mm_token_type_ids"] = kinds
        out = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            suppress_tokens=self.banned,
            eos_token_id=None,
        )
        completion: list[int] = out[0, len(tokens) :].tolist()
        return completion


def test_every_tiny_checkpoint_type_is_compared() -> None:
    # The generic family tries every model against its own forward pass when it is loaded.
    assert {family for family, _ in CHECKPOINTS} == {*registry.family_names()} - {"anyvlm"}
    folder = Path(registry.__file__).parent / "qwen_vl"
    kinds = tomllib.loads((folder / "tiny.toml").read_text())["types"].keys()
    here = {options["type"] for family, options in CHECKPOINTS if family == "qwen_vl"}
    assert here | ELSEWHERE.keys() == kinds and not here & ELSEWHERE.keys()
    for file in ELSEWHERE.values():
        text = (Path(__file__).parent / file).read_text()
        assert "def test_greedy_decoding_matches_transformers" in text, file


@pytest.mark.parametrize(("family", "options"), take_first(CHECKPOINTS, 3), ids=str)
def test_greedy_decoding_matches_transformers(
    family: str, options: dict[str, str], tmp_path: Path, store: MediaStore
) -> None:
    registry.write_tiny(family, tmp_path / "model", seed=0, **options)
    witness = Witness(tmp_path / "model", store)
    renderer = load_renderer(tmp_path / "model", store)
    refs = [store.put(picture(n, 40 * n, 64)) for n in (1, 2)] if witness.family.shows_media else []
    talks = [[user("What is it?", *refs[:1])], [user(*refs, "Both of them?")], [user("Hello.")]]
    prompts = [renderer.render(talk) for talk in talks]
    settings = ServerSpec.of(
        path=tmp_path / "model", media_roots=(store.root,), device="cpu", max_model_len=1024,
        prefill_chunk_tokens=7,
    )  # fmt: skip
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with live(settings) as served:
        client = Client(served.host, served.port, witness.family.modality)
        for prompt in prompts:
            token_ids = client.generate(prompt.token_ids, prompt.slots, params).choices[0].token_ids
            assert token_ids == witness.says(prompt.token_ids, prompt.slots)
            # The next prompt begins with this one and its answer, so keys and values are reused.
            longer = [*prompt.token_ids, *token_ids, *renderer.render([user("More.")]).token_ids]
            answer = client.generate(longer, prompt.slots, params)
            assert answer.choices[0].token_ids == witness.says(longer, prompt.slots)
            assert answer.sightline is not None
            assert answer.sightline.cached_tokens == len(prompt.token_ids) + NUM_TOKENS - 1
