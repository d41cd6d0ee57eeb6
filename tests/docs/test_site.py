"""The docs site: it builds without a warning, and every page can be found on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.docs.pages import ROOT


def leaves(entry: object) -> list[str]:
    """The pages of a table of contents."""
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(entry, dict | list)
    return [page for value in values for page in leaves(value)]


def test_every_page_is_in_the_table_of_contents() -> None:
    """Guards readers of the site from pages that only the repository shows, and from entries without a page."""
    told = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(told) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])


def test_readme_links_to_every_page() -> None:
    """Guards readers of the repository, who have no table of contents: each page is reached from README."""
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name} links to {target}"
            if path not in reached:
                reached.add(path)
                left.append(path)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {path.name for path in reached}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """a13: guards the site from broken links and merge markers: a warning is an error, and links lead somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "Any layout, one answer" in front
    assert "<table>" in front
    for page in (tmp_path / "site").glob("**/*.html"):
        for target in re.findall(r'href="(?!\w+:)([^"#?]+)', page.read_text(encoding="utf-8")):
            found = tmp_path / "site" / target.lstrip("/") if target.startswith("/") else page.parent / target
            assert found.exists(), f"{page.relative_to(tmp_path)} links to {target}"
