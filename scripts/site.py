"""What mkdocs is told about this project: README is the front page, and links that leave docs/ lead to copies of files.

Knows nothing of the pages' contents but their links.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FRONT = "index.md"
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )((?![a-z]+:|#|/)[^)\s#]+)", re.MULTILINE)
"""The target of a link within the project, without its anchor."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, and each file of the project that a page links to."""
    files.append(File.generated(config, FRONT, abs_src_path=str(ROOT / "README.md")))
    for page in files.documentation_pages():
        for _, target in LINK.findall(page.content_string):
            path = _path_of(page.src_uri, target)
            if not path.is_relative_to("docs") and (ROOT / path).is_file() and path != PurePosixPath("README.md"):
                copy = f"files/{path}" + (".txt" if path.suffix == ".md" else "")
                if copy not in files.src_uris:
                    files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are on the site; mkdocs complains of those that have none."""

    def moved(match: re.Match[str]) -> str:
        path = _path_of(page.file.src_uri, match[2])
        if path == PurePosixPath("README.md"):
            return match[1] + FRONT
        if path.is_relative_to("docs"):
            return match[1] + str(path.relative_to("docs"))
        copy = f"files/{path}" + (".txt" if path.suffix == ".md" else "")
        return match[1] + (copy if copy in files.src_uris else match[2])

    return LINK.sub(moved, markdown)


def _path_of(page: str, target: str) -> PurePosixPath:
    """Where in the project a link of a page leads. README's links start from the project's root, others from docs/."""
    parts: list[str] = [] if page == FRONT else ["docs"]
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return PurePosixPath(*parts)
