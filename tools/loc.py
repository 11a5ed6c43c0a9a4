"""Lines of code (no docstrings, comments or blank lines), all lines, files, and lines of docstrings, by folder.

python tools/loc.py leanformer tests
"""

import ast
import io
import sys
import tokenize
from pathlib import Path


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(text: str) -> tuple[int, int]:
    """Return the number of lines of code and of docstrings of a Python source."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_CODE]
    code = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    docs = {
        line
        for node in nodes
        if ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return len(code - docs), len(code & docs)


def main() -> None:
    for folder in sys.argv[1:]:
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).rglob("*.py"))]
        code, docs = (sum(numbers) for numbers in zip(*map(count, texts), strict=True))
        lines = sum(text.count("\n") for text in texts)
        print(f"{folder}: {code:,} lines of code, {lines:,} in all, {len(texts)} files, {docs:,} of docstrings")


if __name__ == "__main__":
    main()
