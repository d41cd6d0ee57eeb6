"""--compile in a map: what factories make of it, what a backend is told, and what isn't silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.features import Compile
from shardwise.mapping.config import Place
from tests.backends import Recorder
from tests.map.pipelines import save_pipeline
from tests.tiny import save_text_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("forgetful", r"never calls place\.compile\(model\): leave --compile out"),
        ("placeless", r"has no parameter place, to call place\.compile\(model\) with"),
    ],
)
@pytest.mark.parametrize("share", ["imports", "model"])
def test_a_factory_that_compiles_nothing(factory: str, why: str, share: str) -> None:
    """Guards operators from --compile that is quietly without effect."""
    with (
        pytest.raises(ValueError, match=why),
        shardwise.map(f"tests.map.compiled:{factory}", [1], device="cpu", share=share, compile="aot_eager") as results,
    ):
        list(results)
    with shardwise.map(f"tests.map.compiled:{factory}", [1], device="cpu", share=share) as results:
        assert [each.output for each in results] == [1]


def test_without_the_flag_a_model_is_as_it_was() -> None:
    """Guards factories: they call place.compile whether or not anything is to be compiled."""
    place = Place(0, 1, "cpu", 1)
    assert place.compile(len) is len
    assert place == Place(0, 1, "cpu", 1)


def run(recorder: Recorder, *flags: str, code: int = 0) -> tuple[list[Any], str]:
    """Two growing items through two real ranks of the command; outputs and stderr."""
    lines = "".join(f"{length}\n" for length in (24, 25))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shardwise",
            "map",
            "tests.map.compiled:build",
            "--layout",
            "dp2",
            "--device",
            "cpu",
            *flags,
        ],
        input=lines,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(recorder.folder)},
    )
    assert done.returncode == code, done.stderr
    return [json.loads(line)["output"] for line in done.stdout.splitlines()], done.stderr


@pytest.mark.slow
def test_options_reach_the_backend_in_ranks(recorder: Recorder) -> None:
    """a9: guards the way of options, mode and dynamic to the backend in each rank, types as JSON has them.

    The model's own methods call what is compiled, and growing sizes take one graph a rank (a11).
    """
    want = [[3.0 * size for size in range(2, length)] for length in (24, 25)]
    options = '{"debug": true, "depth": 1.5, "enabled_precisions": ["fp16"], "names": ["a"]}'
    found, said = run(recorder, "--compile", "record", "--compile-options", options)
    assert found == want
    assert "recompile_limit" not in said
    told = {"debug": True, "depth": 1.5, "enabled_precisions": "…", "names": ["a"]}
    expected = repr(told).replace("'…'", "{torch.float16}")
    records = recorder.records()
    assert [each["told"] for each in records] == [{"options": expected}] * len(records)
    assert len(records) == len({each["pid"] for each in records})
    assert all(each["open"] for each in records)
    recorder.file.unlink()
    found, said = run(
        recorder, "--compile", "record", "--compile-mode", "deep", "--compile-options", '{"dynamic": false}'
    )
    assert found == want
    records = recorder.records()
    assert all(each["told"] == {"mode": "'deep'"} and not each["open"] for each in records)
    ranks = {each["pid"] for each in records}
    assert all(sum(each["pid"] == rank for each in records) == 8 for rank in ranks)  # torch's own bound
    lines = [line for line in said.splitlines() if "recompile_limit" in line]
    assert len(lines) == len(ranks)
    assert all("runs uncompiled" in line for line in lines)


@pytest.mark.slow
def test_factories_of_texts_compile_their_model(tmp_path: Path, recorder: Recorder) -> None:
    """Guards the ready factories: the model's forward is compiled, and its answers stay what they were."""
    from shardwise.factories import embeddings

    model = str(save_text_model(tmp_path / "model"))
    plain, compiled = (embeddings(model, Place(0, 1, "cpu", 1, by)) for by in (None, Compile("record")))
    for text in ("Hello there", "a longer text than that"):
        assert compiled(text)["embedding"] == pytest.approx(plain(text)["embedding"], abs=1e-6)
    assert recorder.records()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch_dtype:FutureWarning")  # older diffusers know it by no other name
def test_the_factory_of_images_compiles_its_denoiser(tmp_path: Path, recorder: Recorder) -> None:
    """a8: guards the part that is worth it, which is the only one: the pipeline's unet."""
    from shardwise.factories import text_to_image

    folder = str(save_pipeline(tmp_path / "model"))
    place = Place(0, 1, "cpu", 1, Compile("record"))
    found = {}
    for name, where in (("plain", Place(0, 1, "cpu", 1)), ("compiled", place)):
        call = text_to_image(folder, where, out=str(tmp_path / name), steps=2, height=32, width=32)
        found[name] = Path(call("a dog", 0)["image"]).read_bytes()
    assert [type(each).__name__ for each in place.compiled] == ["UNet2DConditionModel"]
    assert recorder.records()
    assert found["plain"] == found["compiled"]
