"""Tools as the model was shown them: a namespace of TypeScript types, made from JSON schemas."""

from __future__ import annotations

import json
from typing import Any

from sightline.errors import MessageError
from sightline.families.renderer import encode_tool
from sightline.render.protocol import Tools

_INDENT = "  "
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""What a comment tells of a value, by the type of its schema."""
_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ROOT = "#"
_DEFINITIONS = "#/$defs/"


def declare_tools(tools: Tools) -> str:
    """The text of the declaration; a tool that it cannot express is refused by its path."""
    written = "\n".join(_declare_function(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    return "# Tools\n\n## functions\nnamespace functions {\n" + written + "\n}\n"


def _declare_function(tool: Any, path: str) -> str:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise MessageError.at(path, "not a function", "pass dicts of type function")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError.at(path, "a function without a name", "give it a name")
    parameters = function.get("parameters") or {}
    encode_tool(function, path)
    schemas = _Schemas(f"{path}.parameters")
    schemas.collect(parameters)
    lines = []
    root = schemas.object(parameters, "")
    if schemas.names_root:
        root = "parameters"
        lines.append(f"interface parameters {{{schemas.root_fields(parameters)}}}")
    for name, schema in schemas.definitions.items():
        described = schema.get("description") if isinstance(schema, dict) else None
        if described:
            lines.append(_comment_lines(described, ""))
        lines.append(f"interface {name} {schemas.type(schema, '')}")
    if function.get("description"):
        lines.append(_comment_lines(function["description"], ""))
    lines.append(f"type {function['name']} = (_: {root}) => any;")
    return "\n".join(lines)


class _Schemas:
    """The schemas of one function, and the definitions that they refer to by name."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.definitions: dict[str, Any] = {}
        self.names_root = False

    def collect(self, schema: Any) -> None:
        """Finds definitions and references, in the order in which they are written."""
        if not isinstance(schema, dict):
            return
        if "$ref" in schema:
            self.names_root |= schema["$ref"] == _ROOT
            return
        if schema.get("type", "object") == "object":
            self.definitions.update(schema.get("$defs", {}))
            self.collect(schema.get("additionalProperties"))
            for value in schema.get("properties", {}).values():
                self.collect(value)
        elif schema.get("type") == "array":
            self.collect(schema.get("items"))
        for value in schema.get("anyOf", ()):
            self.collect(value)

    def type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if schema == {}:
            return "any"
        if not isinstance(schema, dict):
            raise self._build_error(f"{schema!r} is no schema")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(value, indent) for value in schema["anyOf"])
        if "enum" in schema:
            # Strings stand between quotes as they are, without escapes.
            return " | ".join(
                f'"{v}"' if isinstance(v, str) else json.dumps(v) for v in schema["enum"]
            )
        kind = schema.get("type")
        if isinstance(kind, list) and all(k in _UNIONS for k in kind):
            return " | ".join(_UNIONS[k] for k in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise self._build_error(f"a schema without a type that we know: {schema}")
        return "number" if kind == "integer" else kind

    def object(self, schema: dict[str, Any], indent: str) -> str:
        required = set(schema.get("required", ()))
        names = sorted(schema.get("properties", {}), key=lambda name: (name not in required, name))
        fields = [
            self._field(schema["properties"][name], name, name in required, indent + _INDENT)
            for name in names
        ]
        others = schema.get("additionalProperties")
        if others is not None:
            kind = "never" if others is False else self.type(others, indent + _INDENT)
            fields.append(f"{indent}{_INDENT}[k: string]: {kind}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def root_fields(self, schema: dict[str, Any]) -> str:
        """The fields of the function's own parameters, in the order in which they are written."""
        required = set(schema.get("required", ()))
        fields = [
            self._field(value, name, name in required, _INDENT)
            for name, value in schema.get("properties", {}).items()
        ]
        return "\n" + ",\n".join(fields) + "\n" if fields else ""

    def _field(self, value: Any, name: str, is_required: bool, indent: str) -> str:
        comments = _write_comments(value, indent)
        if isinstance(value, dict) and value.get("default") is not None:
            default = json.dumps(value["default"], ensure_ascii=False)
            comments += f"{indent}// Default: {default}\n"
        mark = "" if is_required else "?"
        return f"{comments}{indent}{name}{mark}: {self.type(value, indent)}"

    def _array(self, schema: dict[str, Any], indent: str) -> str:
        item = schema.get("items") or {}
        comments = _write_comments(item, indent + _INDENT)
        if not comments:
            return f"Array<{self.type(item, indent)}>"
        inner = indent + _INDENT
        return f"Array<\n{comments}{inner}{self.type(item, inner)}\n{indent}>"

    def _reference(self, reference: Any) -> str:
        if reference == _ROOT:
            return "parameters"
        name = str(reference).rpartition("/")[2]
        if reference != _DEFINITIONS + name or name not in self.definitions:
            raise self._build_error(f"$ref {reference!r} leads nowhere")
        return name

    def _build_error(self, problem: str) -> MessageError:
        return MessageError.at(self._path, problem, "write a JSON schema with types and $defs")


def _write_comments(schema: Any, indent: str) -> str:
    """The lines of comment above a value, each with its newline."""
    if not isinstance(schema, dict) or not schema:
        return ""
    lines = []
    if schema.get("description"):
        lines.append(_comment_lines(schema["description"], indent))
    kind = schema.get("type")
    bounds: list[str] = []
    if isinstance(kind, str) and not schema.keys() & {"$ref", "anyOf", "enum"}:
        bounds = [key for key in _BOUNDS.get(kind, ()) if key in schema]
    if bounds:
        lines.append(f"{indent}// " + ", ".join(f"{key}: {schema[key]}" for key in bounds))
    return "".join(line + "\n" for line in lines)


def _comment_lines(description: Any, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in str(description).split("\n"))
