"""Check the prose of the repository against the word list in CONTRIBUTING.md.

Prose is the text of Markdown pages outside code blocks, the comments and docstrings of Python
files, and the string literals of Python files outside `tests/` (error messages, log lines, help
texts). The words, their replacements and the allowed uses are tables in CONTRIBUTING.md, so that
people and this script read the same list.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENERS = re.compile(r"(What|Of|Whoever|Who|Likewise|So many|As many|Where)\b(?!:)")
"""First words that no docstring may have: such a sentence does not stand alone."""
EXCLUDED = ("CONTRIBUTING.md", "tools/check_prose.py")
"""Files that name the words of the list."""


@dataclass(frozen=True)
class Rule:
    words: str
    instead: str

    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"\b{re.escape(self.words)}\b".replace(r"\ ", r"\s+"), re.IGNORECASE)


def read_table(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the first Markdown table after `heading`."""
    rows: list[list[str]] = []
    for line in text.split(f"\n## {heading}\n", 1)[1].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def split_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are prose, without inline code."""
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif not in_block:
            yield number, re.sub(r"`[^`]*`", "``", line)


def find_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of fields included, with their first lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value


def split_python(text: str, with_strings: bool) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a file, and its other strings if `with_strings`."""
    tree = ast.parse(text)
    if with_strings:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    else:
        yield from find_docstrings(tree)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def check_file(path: Path, name: str, rules: list[Rule], allowed: list[str]) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        pieces = list(split_markdown(text))
    else:
        pieces = list(split_python(text, with_strings=not name.startswith("tests/")))
        for line, docstring in find_docstrings(ast.parse(text)):
            if opener := OPENERS.match(docstring):
                yield f'{name}:{line}: a docstring starts with "{opener.group()}"'
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (ast.get_docstring(node) or "").startswith("Whether"):
                yield f'{name}:{node.lineno}: "Whether": write "Return whether"'
    for line, piece in pieces:
        for phrase in allowed:
            piece = re.sub(re.escape(phrase), "", piece, flags=re.IGNORECASE)
        for rule in rules:
            for match in rule.pattern().finditer(piece):
                at = line + piece.count("\n", 0, match.start())
                yield f'{name}:{at}: "{match.group()}": write {rule.instead}'


def main() -> int:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rules = [Rule(words, instead) for words, instead in read_table(guide, "Words to avoid")]
    allowed = [phrase.strip("`") for phrase, _ in read_table(guide, "Allowed uses")]
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = sys.argv[1:] or listed.stdout.split()
    problems = [
        problem
        for name in names
        if name not in EXCLUDED and (ROOT / name).is_file()
        for problem in check_file(ROOT / name, name, rules, allowed)
    ]
    print("\n".join(problems) or f"prose: {len(names)} files, no word of the list")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
