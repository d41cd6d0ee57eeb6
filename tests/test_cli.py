"""The command line as a person and as a script meet it: real commands, exit codes, one line of error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import ALPHABET, save_text_model

PROMPTS = ["Hello", "a", "The quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def shardwise(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def generate_json(model: Path, *arguments: str | Path) -> dict[str, Any]:
    done = shardwise("generate", *PROMPTS, "--model", model, "--max-tokens", "12", "--json", *arguments)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "7"]], ids=["greedy", "seeded"])
def test_generate_gives_one_document_on_every_layout(model: Path, sampling: list[str]) -> None:
    """Guards the JSON contract, and equal tokens of real commands on real processes."""
    first = generate_json(model, "--layout", "1", *sampling)
    assert first["layout"] == "1"
    assert str(model) in first["model"]
    assert [entry["prompt"] for entry in first["outputs"]] == PROMPTS
    for index, entry in enumerate(first["outputs"]):
        assert set(entry) == {"index", "prompt", "text", "token_ids", "prompt_token_ids", "finish_reason"}
        assert entry["index"] == index
        assert entry["finish_reason"] in ("stop", "length")
        assert 1 <= len(entry["token_ids"]) <= 12
    assert {"load_s", "ttft_s", "decode_tokens_per_s"} <= set(first["timings"])
    layouts = ["tp2", "pp2", "dp2"] if not sampling else ["tp2.pp2"]
    for layout in layouts:
        assert generate_json(model, "--layout", layout, *sampling)["outputs"] == first["outputs"]


def test_stream_prints_the_text(model: Path) -> None:
    """Guards --stream: its pieces are the text, whole characters only."""
    expected = generate_json(model)["outputs"][0]["text"]
    done = shardwise("generate", PROMPTS[0], "--model", model, "--max-tokens", "12", "--stream")
    assert done.stdout == expected + "\n"


def test_a_pipe_stays_quiet(model: Path) -> None:
    """Guards scripts from progress bars: with no terminal, stderr is empty and stdout is the text alone."""
    done = shardwise("generate", PROMPTS[0], "--model", model, "--max-tokens", "3")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 1


def test_a_missing_compiler_is_said_once(model: Path, tmp_path: Path) -> None:
    """Guards against a silent fallback: without a compiler the answer comes over gloo and torch, and stderr says so."""
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    command = ["generate", "Hello", "--model", str(model), "--layout", "tp2", "--max-tokens", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *command], capture_output=True, text=True, timeout=120, env=bare
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("\n")) > 0
    (line,) = done.stderr.splitlines()
    assert "torch kernels" in line
    assert "no C compiler" in line


def test_rows_in_rows_out(model: Path, tmp_path: Path) -> None:
    """C44: bad rows get an error row of their own, the others are done, in order, and the exit code says partial."""
    rows: list[str] = [
        '{"prompt": "Hello", "max_tokens": 3}',
        "{not json",
        '["a", "list"]',
        '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0.5, "seed": 1}',
        '{"prompt": "x", "temperature": -1}',
        '{"prompt": "x", "stream": true}',
        "",
        json.dumps({"prompt": "long " * 200}),
        '{"prompt": ""}',
        '{"messages": [{"role": "system", "content": "be nice"}]}',
        json.dumps({"prompt": [ALPHABET.index(char) for char in "Hello"], "max_tokens": 3}),
        '{"prompt": [72, 999]}',
        '{"max_tokens": 3}',
        '{"prompt": "bye", "max_tokens": 4}',
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows) + "\n")
    done = shardwise("generate", "--input", source, "--output", sink, "--model", model, code=1)
    assert "10 of 14 rows failed" in done.stderr
    found = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [entry["index"] for entry in found] == list(range(len(rows)))
    words = {
        1: "JSON",
        2: "object",
        4: "temperature",
        5: "stream",
        6: "JSON",
        7: "context",
        8: "empty",
        9: "no system role here",
        11: "999",
        12: "prompt or messages",
    }
    for index, entry in enumerate(found):
        if index in words:
            assert words[index] in entry["error"], entry
        else:
            assert entry["token_ids"], entry
    assert found[0]["token_ids"] == found[10]["token_ids"]
    assert "user: hi" in found[3]["prompt"]


def test_rows_in_a_chat(model: Path, tmp_path: Path) -> None:
    """Guards against --chat, or a recipe's messages before the prompt, that a file of prompts makes us forget."""
    source, sink, recipe = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "recipe.yaml"
    source.write_text('{"prompt": "hi"}\n{"messages": [{"role": "user", "content": "yo"}]}\n{"prompt": [72]}\n')
    turns = (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]'
    )
    recipe.write_text(f"model: {model}\nmessages: {turns}\nsampling: {{max_tokens: 2}}\n")
    for how, before in ((["--model", model, "--chat", "--max-tokens", "2"], ""), (["--config", recipe], "user: a")):
        shardwise("generate", "--input", source, "--output", sink, *how, code=1)
        first, second, third = (json.loads(line) for line in sink.read_text().splitlines())
        assert "user: hi" in first["prompt"]
        assert before in first["prompt"]
        assert "user: yo" in second["prompt"]
        assert "user: a" not in second["prompt"]
        assert "chat template" in third["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "tq2"], "layout 'tq2'"),
        (["--layout", "tp40"], "nearest layout that works"),
        (["--layout", "pp9"], "pp can be 1 to 4"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--stages", "1,1", "--layout", "pp2"], "add up to 4"),
        (["--split", "a,b"], "--split"),
        (["--dtype", "int3"], "dtype"),
        (["--quantize", "int3"], "int4,group=64"),
        (["--device", "cuda"], "GPUs"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(model: Path, arguments: list[str], words: str) -> None:
    """C60 and the like: a refusal before anything heavy, one line with the remedy, exit code 2."""
    base = [] if "--model" in arguments else ["--model", str(model)]
    done = shardwise("generate", "x", *base, *arguments, code=2)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_empty_prompt_and_too_long_prompt(model: Path) -> None:
    """C34: an empty prompt without a beginning-of-text token, and one beyond the context, are refused with a remedy."""
    assert "empty" in shardwise("generate", "", "--model", model, code=2).stderr
    assert "context" in shardwise("generate", "long " * 200, "--model", model, code=2).stderr


def test_request_beyond_the_kv_pool_is_refused(model: Path) -> None:
    """C61: what can never fit is refused at once, and what fits beside it is served."""
    done = shardwise(
        "generate", "a" * 60, "ok", "--model", model, "--kv-tokens", "48", "--max-tokens", "8", "--json", code=2
    )
    found = json.loads(done.stdout)["outputs"]
    assert "kv_tokens" in found[0]["error"]
    assert len(found[1]["token_ids"]) == 8


def test_broken_files_are_named(model: Path, tmp_path: Path) -> None:
    """C46: a truncated checkpoint is refused with the file's name and exit code 3, before any rank starts."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = shardwise("generate", "x", "--model", broken, "--layout", "tp2", code=3)
    assert "model.safetensors" in done.stderr


def test_inspect_shows_every_rank_without_reading_weights(model: Path, tmp_path: Path) -> None:
    """Guards inspect: the shares of all ranks add up, and only headers are needed."""
    one = json.loads(shardwise("inspect", model, "--json").stdout)
    four = json.loads(shardwise("inspect", model, "--layout", "tp2.pp2", "--json").stdout)
    assert four["world_size"] == 4
    assert sum(rank["kv_bytes_per_token"] for rank in four["ranks"]) == one["ranks"][0]["kv_bytes_per_token"]
    assert [rank["layers"] for rank in four["ranks"]] == [[0, 2], [0, 2], [2, 4], [2, 4]]
    assert sum(rank["parameters"] for rank in four["ranks"]) >= one["ranks"][0]["parameters"]
    shown = shardwise("inspect", model, "--layout", "tp2").stdout
    assert "layout tp2" in shown
    assert "nearest layout" in shardwise("inspect", model, "--layout", "tp99", code=2).stderr


def test_verify_finds_one_answer(model: Path) -> None:
    """Guards the proof itself: one hash over layouts, batches, chunks, cache hits, drafts, preemption and kills."""
    arguments = ["verify", "--model", model, "--layouts", "1,tp2,pp2", "--batches", "1,6", "--chunks", "5,64"]
    report = json.loads(shardwise(*arguments, "--max-tokens", "6", "--json").stdout)
    assert report["ok"]
    assert len(report["hashes"]) == 1
    assert len(report["cells"]) == 3 * (2 * 2 + 4) + 2  # kills on tp2 and pp2
    assert all(cell["agreement"] == 1.0 for cell in report["cells"])


def test_verify_kernels_tells_the_truth() -> None:
    """Guards the self-check: native kernels hold every property, and the table says which."""
    report = json.loads(shardwise("verify", "--kernels", "--json").stdout)
    assert report["ok"], report
    assert {row["kernel"] for row in report["findings"]} >= {"linear float32", "linear bfloat16", "attend", "rms_norm"}


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def start(model: Path, layout: str = "tp2") -> subprocess.Popen[str]:
    command = ["generate", "go on", "--model", str(model), "--layout", layout, "--max-tokens", "200", "--stream"]
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", *command, "--ignore-eos", "--temperature", "1", "--max-chunk", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = descendants(psutil.Process(process.pid))
        if len(found) >= 1 + count:  # the fork server, and then a process for each rank, which holds its weights
            return sorted(found, key=lambda each: each.create_time())[1 : 1 + count]
        time.sleep(0.01)
    raise AssertionError("the ranks did not start")


def test_a_killed_rank_ends_the_command(model: Path) -> None:
    """F6: a rank killed while it starts ends the command within 2 s with its number, the cause, and no survivor."""
    before = set(os.listdir("/dev/shm"))
    took = 9.0
    for _ in range(3):  # the best of three: this machine has other work too
        process = start(model)
        ranks = wait_for_ranks(process, 2)
        killed = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        took = min(took, time.monotonic() - killed)
        assert process.returncode == 5
        assert "rank 1" in errors
        assert "SIGKILL" in errors
        assert psutil.wait_procs(ranks, timeout=20)[1] == []
        assert set(os.listdir("/dev/shm")) == before
        if took < 2.0:
            break
    assert took < 2.0


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0, 2.5])
def test_interrupt_at_any_time(model: Path, delay: float) -> None:
    """C80: Ctrl-C during the start, twice, ends the command in under 5 s and leaves nothing behind."""
    before = set(os.listdir("/dev/shm"))
    process = start(model)
    ranks = wait_for_ranks(process, 2)
    time.sleep(delay)  # a moment to be interrupted in, not a wait for anything
    interrupted = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - interrupted < 5.0
    assert process.returncode in (130, 0, -signal.SIGINT)
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    assert set(os.listdir("/dev/shm")) == before


def test_the_example_runs(model: Path) -> None:
    """Guards the example from drifting away from the package."""
    example = Path(__file__).parent.parent / "examples" / "any_layout.py"
    done = subprocess.run([sys.executable, example, model], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len({line[4:] for line in done.stdout.splitlines()}) == 1
