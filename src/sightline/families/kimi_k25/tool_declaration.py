"""Declare tools in the model's training format: TypeScript types generated from JSON schemas.

Like the published code, this sorts all keys first. If a schema has no TypeScript type, all tools
are written as JSON. Examples are schemas with only `oneOf` or `const`, and enums with values of a
different type. Values in comments and enums use Python syntax: `True`, `None`.
"""

from __future__ import annotations

import json
from typing import Any

from sightline.errors import MessageError
from sightline.families.turn_parsing import encode_tool
from sightline.render.protocol import Tools

_INDENT = "  "
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""The bounds written in comments, by schema type."""
_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
_ROOT = "#"
_DEFINITIONS = "#/$defs/"


def declare_tools(tools: Tools) -> str:
    """Return the declaration. Raise MessageError for anything but a named function."""
    read = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    try:
        written = "\n".join(_declare_function(tool["function"]) for tool in read)
    except (AttributeError, KeyError, TypeError, ValueError):
        # Like the published code, for invalid schemas and schemas without a type.
        return json.dumps(read, ensure_ascii=False, separators=(",", ":"))
    return "# Tools\n\n## functions\nnamespace functions {\n" + written + "\n}\n"


def _read_tool(tool: Any, path: str) -> dict[str, Any]:
    """Return the tool as plain JSON with sorted keys, with its function under `function`."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        problem = "the tool is not a function"
        raise MessageError.at(path, problem, 'pass dicts with "type": "function"')
    if "function" not in tool:
        tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError.at(path, "the function has no name", "give it a name")
    plain = json.loads(encode_tool({"type": "function", **tool}, path))
    return dict(json.loads(json.dumps(plain, sort_keys=True)))


def _declare_function(function: dict[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    schemas = _Schemas()
    root, names_root = schemas.write_object(parameters, ""), schemas.names_root
    lines = []
    if names_root:
        lines.append(f"interface parameters {{{schemas.write_root_fields(parameters)}}}")
    for name, schema in dict(schemas.definitions).items():
        if schema.get("description"):
            lines.append(_comment_lines(schema["description"], ""))
        lines.append(f"interface {name} {schemas.write(schema, '')}")
    if function.get("description"):
        lines.append(_comment_lines(function["description"], ""))
    lines.append(f"type {function['name']} = (_: {'parameters' if names_root else root}) => any;")
    return "\n".join(lines)


class _Schemas:
    """The schemas of one function, and the definitions that they refer to.

    Schemas are written in alphabetical order, like in the published code, because a definition must
    precede its references. A schema without a type raises a built-in Python exception.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.names_root = False

    def write(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool) or schema == {}:
            return "null" if schema is False else "any"
        if "$ref" in schema:
            return self._write_reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.write(value, indent) for value in schema["anyOf"])
        if "enum" in schema:
            _check_enum(schema)
            # Strings are quoted without escapes.
            return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"])
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(_UNIONS[name] for name in kind)
        if kind == "object":
            return self.write_object(schema, indent)
        if kind == "array":
            return self._write_array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def _write_reference(self, reference: str) -> str:
        if reference == _ROOT:
            self.names_root = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if not reference.startswith(_DEFINITIONS) or not isinstance(self.definitions[name], dict):
            raise ValueError(reference)
        return name

    def write_object(self, schema: dict[str, Any], indent: str) -> str:
        self.definitions.update(schema.get("$defs") or {})
        others = schema.get("additionalProperties")
        if not isinstance(others, bool | dict | None):
            raise ValueError(others)
        kind = "never" if others is False else self.write(others or {}, indent + _INDENT)
        required = set(schema.get("required", ()))
        fields = self._write_fields(schema, indent + _INDENT)
        lines = [fields[name] for name in sorted(fields, key=lambda n: (n not in required, n))]
        if others is not None:
            lines.append(f"{indent}{_INDENT}[k: string]: {kind}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def write_root_fields(self, schema: dict[str, Any]) -> str:
        """Return the fields of the function's parameters, in alphabetical order."""
        fields = self._write_fields(schema, _INDENT).values()
        return "\n" + ",\n".join(fields) + "\n" if fields else ""

    def _write_fields(self, schema: dict[str, Any], indent: str) -> dict[str, str]:
        required, properties = schema.get("required", ()), schema.get("properties", {})
        return {n: self._write_field(properties[n], n, n in required, indent) for n in properties}

    def _write_field(self, value: Any, name: str, is_required: bool, indent: str) -> str:
        comments = _write_comments(value, indent)
        default = value.get("default") if isinstance(value, dict) else None
        if default is not None:
            is_number = isinstance(default, int | float)
            spelled = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
            comments += f"{indent}// Default: {spelled}\n"
        mark = "" if is_required else "?"
        return f"{comments}{indent}{name}{mark}: {self.write(value, indent)}"

    def _write_array(self, schema: dict[str, Any], indent: str) -> str:
        item = schema.get("items") or {}
        comments = _write_comments(item, indent + _INDENT)
        if not comments:
            return f"Array<{self.write(item, indent)}>"
        inner = indent + _INDENT
        return f"Array<\n{comments}{inner}{self.write(item, inner)}\n{indent}>"


def _check_enum(schema: dict[str, Any]) -> None:
    """Raise ValueError unless all values are null or have the schema's type."""
    kind: Any = schema.get("type")
    if isinstance(kind, list):
        others = [name for name in kind if name != "null"]
        if not 0 < len(kind) < 3 or len(others) > 1:
            raise ValueError(kind)
        kind = others[0] if others else "null"
    known = _ENUM_KINDS.get(kind, (object,))
    if not all(value is None or isinstance(value, known) for value in schema["enum"]):
        raise ValueError(schema["enum"])


def _write_comments(schema: Any, indent: str) -> str:
    """Return the comment lines above a value, each with its newline."""
    if not isinstance(schema, dict):
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


def _comment_lines(description: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in description.split("\n"))
