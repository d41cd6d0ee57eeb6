"""What README, docs and examples tell readers to run: the blocks of their sources, and why some can't run here.

Runs nothing. `python -m tests.docs.pages` lists the blocks that are not run, with their reasons.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path for ending in ("py", "sh") for path in (ROOT / "examples").glob(f"**/*.{ending}"))

SHELL, PYTHON = ("sh", "bash", "console"), ("python",)
DATA = ("json", "yaml", "toml", "ini", "text")
"""Languages of blocks that nobody runs; a block in none of these has no language, or one that nobody knows here."""
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?P<what>not run|file): (?P<value>[^>]+?) -->\s*\Z")
NAMED = re.compile(r"# (?P<name>[\w./-]+\.\w+)\n")
"""A first line that says which file a block is."""
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
"""Code within a sentence, which may go on in the next line."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    """Why it isn't run: `<!-- not run: … -->` before it."""
    file: str | None
    """The file that it is: `<!-- file: … -->` before it, or its first line, such as `# sizes.py`."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether readers run it, and we do too."""
        return self.reason is None and self.file is None and self.language in SHELL + PYTHON


def blocks_of(page: Path) -> list[Block]:
    """The page's blocks, in order."""
    source, found, end = page.read_text(encoding="utf-8"), [], 0
    for match in FENCE.finditer(source):
        mark = MARK.search(source[end : match.start()])
        kind, value = (mark["what"], mark["value"]) if mark else ("", None)
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        named = NAMED.match(text)
        file = value if kind == "file" else named["name"] if named else None
        line = source.count("\n", 0, match.start()) + 1
        reason = value if kind == "not run" else None
        found.append(Block(page, line, match["language"], text, reason, file))
        end = match.end()
    return found


def commands_of(text: str, language: str = "sh") -> list[str]:
    """The commands of a block of shell: lines, or several where a quote, a backslash or a document goes on."""
    if language == "console":  # what a terminal shows: commands after a prompt, then what they print
        text = "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith("$ "))
    found, command, here = [], "", None
    for line in text.splitlines():
        if not command and (not line.strip() or line.startswith("#")):
            continue
        command += line + "\n"
        if here is not None:
            here = None if line == here else here
        elif heredoc := re.search(r"<<-?\s*'?(\w+)'?", line):
            here = heredoc[1]
        if here is not None or line.endswith("\\"):
            continue
        try:
            words = shlex.split(command.partition("<<")[0], comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            found.append(command)
        command = ""
    assert not command, f"this command has no end: {command}"
    return found


def inline(page: Path) -> list[str]:
    """Code within the sentences and tables of a page, without its blocks and comments."""
    source = re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL)
    return [" ".join(code.split()) for code in INLINE.findall(source)]


def told_by(example: Path) -> list[str]:
    """The commands in an example's docstring, or in the comment that a script begins with."""
    source = example.read_text(encoding="utf-8")
    if example.suffix == ".py":
        prose = ast.get_docstring(ast.parse(source)) or ""
    else:
        prose = "\n".join(line[1:].strip() for line in source.splitlines() if line.startswith("#"))
    starts = ("python ", "torchrun ", "shardwise ", "accelerate ", "sh ", "bash ", "curl ", "examples/", "./")
    return [line.strip() for line in prose.splitlines() if line.strip().startswith(starts)]


if __name__ == "__main__":
    for page in PAGES:
        for block in blocks_of(page):
            if block.reason is not None:
                print(f"{block}: {block.reason}")
