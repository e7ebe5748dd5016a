"""What is read off a model's class and configuration: how it attends, and what an engine that is
not ours must know of its parts."""

from __future__ import annotations

from typing import Any


def find_text(model: Any) -> Any:
    """The text model, whose `layers` are the decoder's; None for a model that has none."""
    found = model.get_decoder()
    while found is not None and not hasattr(found, "layers"):
        found = getattr(found, "model", None)
    return found


def find_tower(model: Any) -> list[str]:
    """What the names of the tower's parameters begin with: the attributes of the model that hold
    neither the text model nor the head. One that holds both counts as the tower's."""
    parts = (find_text(model), model.get_output_embeddings())
    own = {id(p) for part in parts if part is not None for p in part.parameters()}
    return sorted(
        {".".join(n.split(".")[:2]) for n, p in model.named_parameters() if id(p) not in own}
    )


def find_torch_attention(model: Any) -> list[str]:
    """The modules that are attention of torch itself, such as the pooling head of SigLIP."""
    kinds = ((name, type(part).__mro__) for name, part in model.named_modules())
    return [name for name, mro in kinds if any(k.__name__ == "MultiheadAttention" for k in mro)]


def find_logit_settings(config: Any) -> list[str]:
    """Settings by which the text model would change logits if it stood alone."""
    text = config.get_text_config()
    neutral = {"logit_scale": 1.0, "final_logit_softcapping": None}
    return [name for name, n in neutral.items() if getattr(text, name, None) not in (None, n)]


REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layers that see a part of what is before, and the setting that says how much."""


def find_layer_kinds(config: Any) -> list[str]:
    """What the configuration calls layers that do more than attend to what is before."""
    text = config.get_text_config()
    named = getattr(text, "layer_types", None) or ()
    uses_window = getattr(text, "use_sliding_window", True)
    if not named and uses_window and getattr(text, "sliding_window", None):
        return ["sliding_attention"]
    return sorted(set(named) - {"full_attention"})


def describe_layers(config: Any) -> tuple[str, bool]:
    """What the configuration says of layers that do more than attend to what is before, in words;
    and whether it is more than a trial shows: a state along a row, or a reach that is not named."""
    text = config.get_text_config()
    kinds = find_layer_kinds(config)
    unseen = {k for k in kinds if getattr(text, REACHES.get(k, ""), None) is None}
    return f"layers of this model are of {' and '.join(kinds)}" if kinds else "", bool(unseen)
