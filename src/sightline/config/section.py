"""What every section of a run file is made of: its base, and the types of its settings."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sightline.config.secret_refs import check_reference, check_table

Value = TypeVar("Value")
Mutable = Annotated[Value, Field(json_schema_extra={"mutable": True})]
"""The type of a setting that may change when a run is resumed."""
SecretRef = Annotated[str, AfterValidator(check_reference)]
"""The type of a setting that names where a secret is, and never holds it."""
Keywords = Annotated[dict[str, Any], AfterValidator(check_table)]
"""The type of a table of keyword arguments; a secret in it is a reference."""


class ConfigSection(BaseModel):
    """The docstring under a field is its description in `docs/settings.md`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def get_section_class(annotation: Any) -> type[ConfigSection]:
    """The section that a field of a file holds, whether it may be left out or not."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            return kind
    raise TypeError(f"{annotation} holds no section")
