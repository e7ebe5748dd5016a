"""Compare the vocabularies of two checkpoints, of which one scores the other's tokens."""

from __future__ import annotations

from sightline.errors import ConfigError
from sightline.render.protocol import Renderer


def check_vocabularies(student: Renderer, teacher: Renderer, name: str) -> None:
    """Raise unless each token that the student may sample is the same token for the teacher.

    `name` describes the teacher in the error. An id without a token only needs a place in the
    teacher's head.
    """
    tokens, others = student.tokenizer.list_tokens(), teacher.tokenizer.list_tokens()
    sampled = tokens.keys() - set(student.pad_token_ids)
    differing = [i for i in sampled if tokens[i] != others.get(i)]
    problem = ""
    if differing:
        i = min(differing)
        problem = f"token {i} is {tokens[i]!r} for the policy and {others.get(i)!r} for the teacher"
    elif student.vocab_size > teacher.vocab_size:
        problem = f"the policy has {student.vocab_size} tokens, the teacher {teacher.vocab_size}"
    if problem:
        raise ConfigError(
            f"{name} has another vocabulary than the policy: {problem}",
            "use a teacher with the policy's tokenizer",
        )
