"""Greedy answers of a vLLM that knows nothing of us, of one checkpoint after the other.

python offline.py QUESTIONS ANSWERS     each a JSON file: a list, one entry a checkpoint
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    questions = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(question) for question in questions]))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image
    from vllm import LLM, SamplingParams

    engine = LLM(
        question["model"], dtype="float32", enforce_eager=True, max_model_len=512, block_size=32,
        limit_mm_per_prompt={"image": 1, "video": 0}, logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=question["max_tokens"], logprobs=0, ignore_eos=True,
        logit_bias=dict.fromkeys(question["banned"], -100.0),
    )  # fmt: skip
    prompt = {
        "prompt_token_ids": question["token_ids"],
        "multi_modal_data": {"image": Image.open(question["image"])},
    }
    [output] = engine.generate([prompt], params)  # type: ignore[list-item]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    token_ids = zip(completion.token_ids, completion.logprobs, strict=True)
    logprobs = [entry[token].logprob for token, entry in token_ids]
    del engine
    return {"token_ids": list(completion.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    main()
