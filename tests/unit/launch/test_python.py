"""The Python API: lazy names, images in messages, `evaluate`, `train`. docs/python.md runs."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from unit.rollout.test_many import playing

from sightline import Environment, Task, evaluate, train, user
from sightline.config import RunFile
from sightline.errors import ConfigError, MessageError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.wire.control import RolloutRequest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "python.md"
ENVIRONMENT, SCORE, RUN = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(REFUSAL,) = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


def picture(colour: str = "red") -> Image.Image:
    return Image.new("RGB", (32, 32), colour)


def png() -> bytes:
    file = io.BytesIO()
    picture().save(file, "PNG")
    return file.getvalue()


class Shows(Environment):
    """Sends one image, as an object or in a dict."""

    name = "shows"

    def __init__(self, image: Any, as_dict: bool = False) -> None:
        self.image, self.as_dict = image, as_dict

    def task(self, index: int, split: str) -> Task:
        return Task(index, split)

    async def rollout(self, task: Task, chat: Any) -> float:
        message: Any = user(self.image, "What is this?")
        if self.as_dict:
            message = {"role": "user", "content": [{"type": "image", "image": self.image}]}
        await chat.send([message])
        self.seen = chat.history[0].images
        return 1.0


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("kind", ["pil", "bytes", "path"])
def test_pil_image_is_stored_when_its_message_is_sent(
    kind: str, as_dict: bool, tiny_model: Path, store: MediaStore, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    image = {"pil": picture(), "bytes": png(), "path": tmp_path / "a.png"}[kind]
    env = Shows(image, as_dict)

    async def main() -> Any:
        async with playing(env, load_renderer(tiny_model, store), store) as player:
            return (await player.play(RolloutRequest("r", "g", 3, "train", 1, 1.0))).trace

    trace = asyncio.run(main())
    assert not trace.error and trace.num_images_shown == 1
    assert store.image(env.seen[0]).getpixel((0, 0)) == (255, 0, 0)


def test_invalid_part_is_refused_when_the_message_is_built(
    tiny_model: Path, store: MediaStore
) -> None:
    with pytest.raises(MessageError, match=r"user\(\)\[1\]: its type is int"):
        user("a", 3)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"content\[0\].ref: its type is Image.*"):
        load_renderer(tiny_model, store).render([user(picture())])


@pytest.mark.thorough
def test_documented_code_scores_a_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    names: dict[str, Any] = {"__name__": "docs"}

    async def in_a_notebook() -> None:
        """A notebook's cell runs inside an event loop."""
        exec(ENVIRONMENT + SCORE, names)

    asyncio.run(in_a_notebook())
    summary, trace = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"<4 tasks: reward .* \(.* to .*\); 0 broken, 0 truncated>", summary)
    assert re.fullmatch(r"<trace eval.0: colors task 0, 1 turns, \d+ tokens, reward .*>", trace)


def test_unknown_evaluation_settings_are_refused(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="max_token"):
        evaluate(Shows(picture()), tiny_model, max_token=3)
    with pytest.raises(ConfigError, match="tasks = 0"):
        evaluate(Shows(picture()), tiny_model, tasks=0)


def test_environment_defined_in_a_notebook_is_refused(tiny_model: Path) -> None:
    kind = type("Colors", (Shows,), {"__module__": "__main__"})
    file = {"model": {"path": str(tiny_model)}}
    with pytest.raises(ConfigError) as refused:
        train(file, env=kind)
    assert str(refused.value) == REFUSAL
    with pytest.raises(ConfigError, match='write run={"key"'):
        train(file, run=3)
    with pytest.raises(ConfigError, match="unknown key"):
        train(RunFile(model=file["model"], env={"name": "a:B"}), **{"run.stepz": 3})  # type: ignore
