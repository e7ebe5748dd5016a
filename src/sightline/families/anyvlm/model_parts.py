"""Read from a model's class and configuration how it attends, and what its parts are."""

from __future__ import annotations

from typing import Any


def find_text(model: Any) -> Any:
    """Return the text model, which has the decoder's `layers`, or None."""
    text = model.get_decoder()
    while text is not None and not hasattr(text, "layers"):
        text = getattr(text, "model", None)
    return text


def find_tower(model: Any) -> list[str]:
    """Return the prefixes of parameters that belong neither to the text model nor to the head."""
    parts = (find_text(model), model.get_output_embeddings())
    own = {id(p) for part in parts if part is not None for p in part.parameters()}
    return sorted(
        {".".join(n.split(".")[:2]) for n, p in model.named_parameters() if id(p) not in own}
    )


def find_torch_attention(model: Any) -> list[str]:
    """Return the modules that are torch's own attention, such as SigLIP's pooling head."""
    kinds = ((name, type(part).__mro__) for name, part in model.named_modules())
    return [name for name, mro in kinds if any(k.__name__ == "MultiheadAttention" for k in mro)]


def find_logit_settings(config: Any) -> list[str]:
    """Return settings by which the text model, on its own, would change logits."""
    text = config.get_text_config()
    neutral = {"logit_scale": 1.0, "final_logit_softcapping": None}
    return [name for name, n in neutral.items() if getattr(text, name, None) not in (None, n)]


REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers with a limited reach, and the setting that limits it."""


def find_layer_kinds(config: Any) -> list[str]:
    """Return the configuration's names of layers that are more than causal attention."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    uses_window = getattr(text, "use_sliding_window", True)
    if not types and uses_window and getattr(text, "sliding_window", None):
        return ["sliding_attention"]
    return sorted(set(types) - {"full_attention"})


def describe_layers(config: Any) -> tuple[str, bool]:
    """Describe layers that are more than causal attention.

    Also return whether a trial cannot show it: layers with a state, or with an unknown reach.
    """
    text = config.get_text_config()
    kinds = find_layer_kinds(config)
    unseen = {k for k in kinds if getattr(text, REACHES.get(k, ""), None) is None}
    return f"layers of this model are of {' and '.join(kinds)}" if kinds else "", bool(unseen)
