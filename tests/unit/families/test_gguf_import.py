"""`sightline model import`: a GGUF file becomes a checkpoint with the same weights and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sightline.cli.main import main
from sightline.families import load_family
from sightline.families.registry import write_tiny


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Write a tiny checkpoint as llama.cpp does, with permuted rows of queries and keys."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {number: text for text, number in tokenizer["model"]["vocab"].items()} | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens[number] for number in sorted(tokens)])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[number in added] for number in sorted(tokens)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        written = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(written, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_imported_model_computes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file, folder = tmp_path / "source", tmp_path / "tiny.gguf", tmp_path / "model"
    write_tiny("anyvlm", source, type="llama")
    write_gguf(source, file)
    assert main(["model", "import", str(file), str(folder)]) == 0
    assert "dequantized from F32" in capsys.readouterr().out
    question = [{"role": "user", "content": "what is it?"}]
    ids, logits = [], []
    for path in (source, folder):
        tokenizer = AutoTokenizer.from_pretrained(path)
        encoded = tokenizer.apply_chat_template(question, return_tensors="pt", return_dict=True)
        ids.append(encoded["input_ids"])
        logits.append(AutoModelForCausalLM.from_pretrained(path)(ids[0]).logits)
    assert torch.equal(*ids)
    torch.testing.assert_close(*logits)
    assert not load_family(folder).shows_media


def test_broken_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    assert main(["model", "import", str(file), str(tmp_path / "model")]) == 2
    assert f"transformers cannot read {file}" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
