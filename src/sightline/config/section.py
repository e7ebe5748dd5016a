"""The base class of run file sections, and types for their settings."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sightline.config.secret_refs import check_reference, check_table

Value = TypeVar("Value")
Mutable = Annotated[Value, Field(json_schema_extra={"mutable": True})]
"""A setting that may change when a run resumes."""
SecretRef = Annotated[str, AfterValidator(check_reference)]
"""A reference to a secret: env:NAME or file:PATH. It never holds the secret itself."""
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Keywords = Annotated[dict[str, Any], AfterValidator(check_table)]
"""A table of keyword arguments. Secrets in it must be references."""


class ConfigSection(BaseModel):
    """A section of a run file. The docstring under a field is its text in `docs/settings.md`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def get_section_class(annotation: Any) -> type[ConfigSection]:
    """Return the section class of a file's field, optional or not."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            return kind
    raise TypeError(f"{annotation} holds no section")
