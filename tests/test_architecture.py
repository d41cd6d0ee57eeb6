"""The rooms and the arrows between them: an import that is not listed here is a design change."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardwise"

ARROWS = {
    "__init__": {"engine", "llm", "outputs", "mapping", "integrations"},
    "__main__": {"cli"},
    "cli": {
        *("generate", "progress", "verify", "describe", "runtime", "weights", "server", "options", "serving"),
        *("mapping", "convert", "evaluation", "world", "recipes"),
    },
    "serving": {"options", "server", "chat", "conversation", "world"},
    "options": {"world"},
    "world": set(),
    "generate": {"llm", "outputs", "progress", "rows"},
    "rows": {"intake", "llm", "outputs", "schedule"},
    "verify": {"open", "engine", "replicas", "runtime", "schedule", "tokenizer", "kernels"},
    "describe": {"runtime"},
    "server": {
        *("open", "intake", "engine", "replicas", "runtime", "schedule", "tokenizer", "parsers", "defaults", "grammar"),
        *("__init__", "store", "weights"),
    },
    "chat": {"answers", "conversation"},
    "answers": {"llm", "progress"},
    "conversation": set(),
    "llm": {"open", "engine", "runtime", "schedule", "intake", "outputs"},
    "open": {"replicas", "engine", "runtime", "schedule", "tokenizer", "intake", "defaults"},
    "intake": {"schedule", "tokenizer", "grammar"},
    "outputs": {"schedule"},
    "defaults": set(),
    "grammar": {"tokenizer"},
    "parsers": set(),
    "mapping": {"options", "progress", "runtime"},
    "factories": {"mapping"},
    "convert": {"models", "weights", "parallel", "runtime", "tokenizer", "options", "progress"},
    "evaluation": {"llm", "passage", "options", "progress"},
    "passage": {"verify"},
    "progress": set(),
    "recipes": {"shapes", "strict_yaml"},
    "store": {"runtime", "shapes", "strict_yaml"},
    "shapes": {"strict_yaml"},
    "integrations": {
        *("engine", "intake", "llm", "open", "rows", "runtime", "server", "shapes", "strict_yaml"),
    },
    "strict_yaml": set(),
    "replicas": {"engine", "runtime", "schedule"},
    "engine": {"schedule", "runtime", "tokenizer"},
    "runtime": {"models", "weights", "parallel", "schedule", "kernels", "world", "__init__"},
    "models": {"parallel", "kernels"},
    "weights": {"parallel"},
    "parallel": {"kernels"},
    "reference": {"models"},
    "schedule": set(),
    "kernels": set(),
    "tokenizer": set(),
    "config": set(),
    "features": set(),
    "params": set(),
}
"""Room → rooms it may import; config, features and params are leaves that anyone may."""

TORCH = {
    *("runtime", "models", "kernels", "parallel", "weights", "reference", "verify", "factories", "convert"),
    "integrations",
}
WEB = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "pydantic_core", "prometheus_client")
"""Packages for the server only: the engine works without them."""


def imports(path: Path) -> set[str]:
    """Every module that a file imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            found.add(node.module or "")
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_listed_arrows(path: Path) -> None:
    """Guards against a room quietly coming to know another."""
    own = room(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "shardwise":
            other = parts[1] if len(parts) > 1 else "__init__"
            assert other in ARROWS[own] | {own, "config", "features", "params"}, f"{own} must not import {module}"
        if parts[0] == "torch":
            assert own in TORCH, f"{own} must not import torch"
        assert parts[0] not in WEB or own == "server", f"{own} must not import {module}"


ROOT = PACKAGE.parent
OURS = sorted(path for name in ("shardwise", "bench", "examples", "scripts") for path in ROOT.glob(f"{name}/**/*.py"))
"""All but the tests, which run what they have written themselves."""
LOADERS = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib", "jsonpickle", "yaml", "multiprocessing"}
"""Modules that make objects, and so calls, of bytes; the last one for what its pipes carry."""
RUNNERS = {"__import__", "load_module", "run_path", "recv_pyobj", "import_module"}
PICKLED_READER = PACKAGE / "convert" / "pickled.py"
YAML_READER = PACKAGE / "strict_yaml.py"
PICKLED = {"torch", "np", "numpy", "hub", "joblib", "yaml"}
"""What has a ``load`` that may run what it reads."""
YAML_EVENTS = {f"{name}Event" for name in ("Node", "Alias", "Scalar", "SequenceStart", "SequenceEnd", "MappingEnd")}


def runs_data(source: str) -> list[str]:
    """Each place of a source that could turn bytes from elsewhere into running code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
        found += [name for name in names if name.split(".")[0] in LOADERS or name == "torch.load"]
        if isinstance(node, ast.Attribute | ast.Name):
            owner, _, name = ast.unparse(node).rpartition(".")
            if name in ("eval", "exec") and owner in ("", "builtins"):
                found.append(name)
            if name in RUNNERS or name.endswith("_object_list") or (name == "load" and owner.split(".")[-1] in PICKLED):
                found.append(ast.unparse(node))
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(keyword.value) != "False":
                found.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_way_to_run_data(path: Path) -> None:
    """R1: guards against code that turns a model's bytes or a peer's bytes into running code.

    One line of `shardwise convert` opens what torch has pickled, without running it. One file reads YAML, by the
    parser's events, of which it constructs nothing but words, numbers, lists and mappings.
    """
    source = path.read_text()
    if path == PICKLED_READER:
        safe = 'torch.load(path, map_location="cpu", weights_only=True, mmap=True)'
        assert source.count(safe) == 1
        source = source.replace(safe, "None")
    if path == YAML_READER:
        assert source.count("yaml.parse(text, yaml.SafeLoader)") == 1
        assert set(re.findall(r"\byaml\.(\w+)", source)) - {"SafeLoader", "parse", "YAMLError"} <= YAML_EVENTS
        source = source.replace("import yaml\n", "")
    assert not runs_data(source)


def test_only_convert_opens_pickled_weights() -> None:
    """R1: guards against another command that comes to open them."""
    users = {room(path) for path in FILES if "shardwise.convert.pickled" in imports(path)}
    callers = {room(path) for path in FILES if any(name.startswith("shardwise.convert") for name in imports(path))}
    assert users == {"convert"}
    assert callers == {"convert", "cli"}


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from marshal import loads", "import os, yaml", "torch.load(x)", "from torch import load"),
        *("np.load(f, allow_pickle=True)", "torch.hub.load(x)", "dist.all_gather_object_list(a, b)", "eval('1')"),
        *(
            "f(trust_remote_code=True)",
            "f(trust_remote_code=flag)",
            "run = exec",
            "socket.recv_pyobj()",
            "builtins.eval",
        ),
    ],
)
def test_ways_to_run_data_are_seen(source: str) -> None:
    """R1: guards the guard."""
    assert runs_data(source)


def test_one_place_imports_by_name() -> None:
    """R1: guards against a second place that imports what a string names; the one is for factories, named by users."""
    found = [path for path in OURS if "resolve_name" in path.read_text()]
    assert [str(path.relative_to(PACKAGE)) for path in found] == ["mapping/rank.py"]


def test_front_process_starts_without_torch() -> None:
    """Guards the quick start of --help, the scheduler and the front process: none may import torch."""
    modules = (
        "shardwise, shardwise.cli, shardwise.llm, shardwise.verify, shardwise.describe, shardwise.runtime.processes, "
        "shardwise.server.life, shardwise.mapping.rank, shardwise.factories, shardwise.store.custom, "
        "shardwise.store.worker, shardwise.server.store.life"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names() -> None:
    """Guards the public face: exactly the names listed, nothing leaked."""
    import shardwise

    assert sorted(shardwise.__all__) == sorted(
        [
            *("LLM", "CompletionOutput", "EngineConfig", "Layout", "Output", "RequestOutput"),
            *("SamplingParams", "Speculation", "__version__", "Mapped", "Place", "map"),
            "load_from_full_state_dict",
        ]
    )
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None


def python_code(path: Path) -> int:
    """Lines of a Python file that are neither blank nor comment nor docstring."""
    text = path.read_text()
    prose = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for number, line in lines if number not in prose)


OUTER = (
    *("grammar", "parsers", "verify", "describe", "generate", "rows", "defaults", "progress"),
    *("cli", "options", "serving", "server", "chat", "answers", "conversation", "mapping", "factories"),
    *("convert", "evaluation", "passage", "recipes", "shapes", "strict_yaml", "integrations", "store"),
)
"""Rooms that hang on the outside: one prompt can be followed through the code without them."""
OTHERS = ("bloom", "gpt2", "mixtral", "opt", "plain", "qwen2", "qwen3")
"""Families beside Llama, and what they share: it takes one to understand them all."""
ASIDE = (
    *("runtime/hosts/", "runtime/offload", "runtime/backends", "runtime/compiling", "kernels/compiled"),
    *("runtime/profile", "runtime/disk", "parallel/seal", "parallel/tcp", "parallel/traced", "world"),
)
"""What a run never enters that is on one host, in its memory, not compiled and not traced."""


def test_package_stays_readable() -> None:
    """Guards the promise that an engineer can read the engine in an afternoon: code, without prose and blank lines."""
    inner = [path for path in FILES if room(path) not in OUTER and path.stem not in OTHERS]
    core = [path for path in inner if not str(path.relative_to(PACKAGE)).startswith(ASIDE)]
    assert sum(map(python_code, core)) < 8700
    assert sum(map(python_code, FILES)) < 24200
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.[ch]")) < 1300
    assert max(len(path.read_text().splitlines()) for path in FILES) < 350
