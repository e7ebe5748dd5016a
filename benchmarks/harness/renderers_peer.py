"""The package `renderers`' side of `python -m benchmarks render`.

    python -P renderers_peer.py MODEL FOLDER TURNS

It runs in its own process, so that the memory of the two sides is separate. For each turn it prints
seconds, bytes of pixels held, and tokens so far. It prints nothing if the package has no
configuration for the model.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import renderers
import torch
from transformers import AutoImageProcessor, AutoTokenizer


def find_config(model: str) -> Any:
    """Return the configuration class for a checkpoint's model type, or None."""
    kind = json.loads((Path(model) / "config.json").read_text())["model_type"]
    wanted = f"{kind}rendererconfig".replace("_", "")
    return next((getattr(renderers, n) for n in dir(renderers) if n.lower() == wanted), None)


def main() -> None:
    model, folder, turns = sys.argv[1:]
    torch.set_num_threads(1)
    config = find_config(model)
    if config is None:
        return
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    tokenizer.unk_token = None
    images = AutoImageProcessor.from_pretrained(model, backend="pil", local_files_only=True)
    renderer = renderers.create_renderer(tokenizer, config())
    renderer._processor = SimpleNamespace(image_processor=images)
    begin = [{"role": "user", "content": "begin"}]
    ids = renderer.render(begin, add_generation_prompt=True).token_ids
    completion_ids = [
        *tokenizer.encode("go on", add_special_tokens=False),
        renderer.get_stop_token_ids()[0],
    ]
    multi_modal_data = None
    for turn in range(int(turns)):
        part = {"type": "image_url", "image_url": {"url": f"file://{folder}/{turn}.png"}}
        content = [{"type": "text", "text": f"page {turn}"}, part]
        began = time.perf_counter()
        bridged = renderer.bridge_to_next_turn(
            ids,
            completion_ids,
            [{"role": "user", "content": content}],
            previous_multi_modal_data=multi_modal_data,
        )
        spent = time.perf_counter() - began
        ids, multi_modal_data = bridged.token_ids, bridged.multi_modal_data
        pixels = sum(item["pixel_values"].nbytes for item in multi_modal_data.mm_items["image"])
        print(json.dumps([spent, pixels, len(ids)]), flush=True)


if __name__ == "__main__":
    main()
