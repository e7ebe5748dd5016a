"""Models, processors and chat templates that an unknown checkpoint may have, and that a run must
not take: the generic family's trials refuse each, or limit what it is used for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import making
import msgspec
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from sightline import FamilyError, MediaStore
from sightline.cli.main import main
from sightline.compute.model import load_model
from sightline.errors import MediaRefused, MessageError
from sightline.families import load_family, load_renderer
from sightline.families.anyvlm import layout
from sightline.families.anyvlm.findings import FILE
from sightline.families.anyvlm.image_tokens import ImageTokens
from sightline.families.anyvlm.processor import load_processor, process
from sightline.families.anyvlm.render import draw_history
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine, build_trial
from sightline.message import Message, TextPart, user
from sightline.pixels import Materializer
from sightline.render import Bridged, Refused
from sightline.trainer.ranks import RankInfo
from tests.contract.cases.anyvlm import write_kind


class TwiceConfig(LlamaConfig):
    model_type = "llama_twice"


class AttendingTwice(LlamaAttention):
    """It calls attention twice, and the second call overwrites the first one's cached keys."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        once, _ = super().forward(hidden_states, **options)
        return super().forward(hidden_states + once, **options)


class TwiceModel(LlamaModel):
    config_class = TwiceConfig

    def __init__(self, config: TwiceConfig) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = AttendingTwice(config, i)
        self.post_init()


AutoConfig.register(TwiceConfig.model_type, TwiceConfig)
AutoModel.register(TwiceConfig, TwiceModel)


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_kind("llava", tmp_path / "model")
    return tmp_path / "model"


def load_any(path: Path) -> AnyVLMFamily:
    family = load_family(path)
    assert isinstance(family, AnyVLMFamily)
    return family


def test_two_attentions_per_layer_are_not_decoded_with_a_cache(folder: Path) -> None:
    """Packed and as a tree, they compute the same as alone."""
    kind = {"model_type": TwiceConfig.model_type}
    edit(folder / "config.json", lambda config: config["text_config"].update(kind))
    family = load_any(folder)
    assert family.packing.kind == "rows"
    assert "decoded with a KV cache, their output differs" in family.packing.reason
    engine = build_trial(256, "cpu", "float32")
    load_model(folder, family, "cpu", "float32", engine=engine)
    cached = AnyVLMFamily(folder, msgspec.structs.replace(family.findings, rows_reason=""))
    load_model(folder, cached, "cpu", "float32")
    with pytest.raises(FamilyError, match=r"/model: the weights trial failed: decoded with the KV"):
        load_model(folder, cached, "cpu", "float32", engine=engine)
    # `sightline serve`, which evaluation and a run start too, refuses the folder itself.
    spec = ServerSpec.of(path=str(folder), device="cpu", media_roots=[str(folder)])
    with pytest.raises(FamilyError) as refused:
        build_engine(spec, cached, cast(Materializer, None), ())
    problem = refused.value.problem
    assert problem.startswith(f"{folder}: the weights trial failed: decoded with the KV cache for")
    assert "of the largest logit (1e-04 is allowed)" in problem and "server" not in problem


def test_rank_0_runs_the_weights_trial_before_the_ranks_load_their_shards(tmp_path: Path) -> None:
    """Gemma 3 attends both ways within an image, which these findings do not say."""
    model = tmp_path / "model"
    write_kind("gemma3", model)
    assert load_any(model).packing.kind == "rows"
    edit(model / FILE, lambda findings: findings.update(rows_reason=""))
    ranks = RankInfo(0, 2, master_address="not an address:1")  # refused in `join`
    with pytest.raises(FamilyError, match="the weights trial failed: computed"):
        making.build_learner(
            making.model_config(model),
            making.trainer_config(ranks=2),
            MediaStore(tmp_path / "media"),
            steps=1,
            ranks=ranks,
        )


@pytest.mark.thorough
def test_eval_shows_why_serve_refuses_the_folder(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_template(folder, ("for message in messages", "for message in messages[-10:]"))
    words = ["eval", "color_codeword", "--checkpoint", str(folder), "--device", "cpu"]
    assert main([*words, "--media", str(tmp_path / "media")]) == 2
    refusal, _, after = capfd.readouterr().err.partition("\n")
    assert refusal.startswith(f"{folder}: the chat template trial failed: a conversation of 12")
    assert "server" not in refusal
    assert f"{folder} cannot be served. The error above says why" in after


def build_paddle(path: Path) -> PaddleOCRVLProcessor:
    """PaddleOCR-VL's processor, with the tokenizer of another checkpoint."""
    tokenizer = load_processor(path).tokenizer
    tokenizer.image_token = "<|image_pad|>"
    limits = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(size=limits), tokenizer)


def count_tokens(processor: Any, size: tuple[int, int]) -> int | None:
    try:
        arrays, _ = process(processor, Image.new("RGB", size))
    except ValueError:
        return None
    return int(arrays["image_grid_thw"].prod()) // 4


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_vl") / "model"
    write_kind("qwen2_vl", path)
    return path


def draw_sizes() -> list[tuple[int, int]]:
    edges = [1, 2, 13, 14, 15, 27, 28, 29]
    draw = random.Random(7)
    drawn = [tuple(round(2 ** draw.uniform(0, 10)) for _ in range(2)) for _ in range(30)]
    return [(e, 300) for e in edges] + [(300, e) for e in edges] + [(a, b) for a, b in drawn]


def test_paddle_ocr_has_the_processors_token_counts_for_small_sides(qwen2_vl: Path) -> None:
    processor, family = build_paddle(qwen2_vl), load_any(qwen2_vl)
    findings = ImageTokens(qwen2_vl, processor).find_rule(family.findings)
    assert findings.rule_settings["enlarges"] and findings.min_side == 1
    paddle = AnyVLMFamily(qwen2_vl, findings)
    plain = msgspec.structs.replace(
        findings, rule_settings=findings.rule_settings | {"enlarges": 0}
    )
    wrong = AnyVLMFamily(qwen2_vl, plain)
    num_wrong = 0
    for size in draw_sizes():
        expected = count_tokens(processor, size)
        if expected is None:
            with pytest.raises(MediaRefused):
                paddle.layout(*size)
            continue
        assert paddle.layout(*size).num_tokens == expected, size
        try:
            num_wrong += wrong.layout(*size).num_tokens != expected
        except MediaRefused:
            num_wrong += 1
    assert num_wrong > 5


@pytest.mark.parametrize(("longest", "is_taken"), [(20, True), (100, False)])
def test_sides_for_which_the_rule_is_wrong_are_refused_at_layout(
    longest: int, is_taken: bool, qwen2_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, words = layout.RULES["patches"]

    def count_wrongly(width: int, height: int, settings: dict[str, int]) -> layout.Size | None:
        return (2, 2) if min(width, height) <= longest else count(width, height, settings)

    images, family = ImageTokens(qwen2_vl, load_processor(qwen2_vl)), load_any(qwen2_vl)
    monkeypatch.setitem(layout.RULES, "patches", (count_wrongly, words))
    if not is_taken:
        with pytest.raises(FamilyError, match="no known rule gives the number of tokens"):
            images.find_rule(family.findings)
        return
    limited = AnyVLMFamily(qwen2_vl, images.find_rule(family.findings))
    assert longest < limited.findings.min_side <= 28
    with pytest.raises(MediaRefused, match=r"20x300 has a side shorter than \d+ pixels"):
        limited.layout(longest, 300)
    assert limited.layout(300, 28).num_tokens == family.layout(300, 28).num_tokens


def edit_template(path: Path, *edits: tuple[str, str]) -> None:
    file = path / "chat_template.jinja"
    for old, new in edits:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))


def test_names_that_the_template_writes_are_refused(folder: Path, tmp_path: Path) -> None:
    edit_template(
        folder, ("message['role'] +", "message['role'] + message['name'] | default('') +")
    )
    renderer = load_renderer(folder, MediaStore(tmp_path / "media"))
    message = Message(role="user", content=(TextPart("a"),), name="n")
    with pytest.raises(MessageError) as caught:
        renderer.render([message])
    assert caught.value.path == "messages[0].name"


def test_template_that_forgets_old_messages_is_refused(folder: Path) -> None:
    edit_template(folder, ("for message in messages", "for message in messages[-10:]"))
    with pytest.raises(FamilyError, match="a conversation of 12 messages cannot be rendered"):
        load_family(folder)


def test_template_that_changes_with_the_number_of_messages_is_not_bridged(
    folder: Path, tmp_path: Path
) -> None:
    """From the ninth message on, it repeats an instruction."""
    store = MediaStore(tmp_path / "media")
    talk = draw_history(9)
    plain = load_renderer(folder, store)
    completion = [*plain._tokenizer.encode_marked("b"), plain.end_id]  # type: ignore[attr-defined]

    def bridge(renderer: Any, history: list[Message]) -> Any:
        return renderer.bridge(renderer.render(history).token_ids, completion, [user("e")])

    assert isinstance(bridge(plain, talk), Bridged)
    other, mark = tmp_path / "other", "message['role'] + "
    write_kind("llava", other)
    edit_template(other, (mark, mark + "(' briefly' if loop.index0 > 7 else '') + "))
    renderer = load_renderer(other, store)
    assert "<|im_start|>user briefly" in renderer.decode(renderer.render(talk).token_ids)
    for history in (talk, talk[:1]):
        assert bridge(renderer, history) == Refused("history_rewritten")
