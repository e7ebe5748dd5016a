"""Build a small VLM from SmolLM2 and an untrained vision tower: `python build.py SMOLLM2 DIR`.

The architecture is SmolVLM's. An image of 256 x 256 pixels becomes 16 tokens. The language model
keeps the weights of SmolLM2-135M-Instruct. Tower and connector are random until they are trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

SIDE, PATCH, SCALE = 256, 16, 4
NUM_TOKENS = (SIDE // PATCH // SCALE) ** 2
MARKS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def build(language_model: Path, folder: Path) -> int:
    """Write the VLM, and return its number of parameters."""
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    text = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    config = SmolVLMConfig(
        text_config=text.config.to_dict(),
        vision_config={
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config)
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    side = {"longest_edge": SIDE}
    for name, values in (
        (
            "preprocessor_config",
            {
                "image_processor_type": "SmolVLMImageProcessor",
                "size": side,
                "max_image_size": side,
                "do_image_splitting": False,
            },
        ),
        ("processor_config", {"processor_class": "SmolVLMProcessor", "image_seq_len": NUM_TOKENS}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"extra_special_tokens": MARKS}
    file.write_text(json.dumps(settings, indent=2) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("language_model", type=Path, metavar="SMOLLM2")
    parser.add_argument("folder", type=Path, metavar="DIR")
    args = parser.parse_args()
    print(f"{args.folder}: {build(args.language_model, args.folder):,} parameters")
