"""The ready factories, on tiny random models, against the libraries themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.factories import classification, embeddings, need, text_to_image
from shardwise.factories.images import kind_of
from shardwise.factories.loading import fields_of
from shardwise.mapping.config import Place
from tests.map.pipelines import save_pipeline
from tests.tiny import save_text_model

HERE = Place(0, 1, "cpu", 1)
TEXTS = ["Hello there", "a", "The quick brown fox"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def test_embeddings(model: Path) -> None:
    """Guards embeddings from padding and wrong tokens: a list gives what each text gives alone."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    for pooling in ("mean", "first", "last"):
        call = embeddings(str(model), HERE, pooling=pooling)
        rows = [row["embedding"] for row in call([*TEXTS[:2], {"text": TEXTS[2]}])]
        for text, row in zip(TEXTS, rows, strict=True):
            with torch.inference_mode():
                hidden = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            want = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]
            torch.testing.assert_close(torch.tensor(row), want / want.norm(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.tensor(call(text)["embedding"]), torch.tensor(row), rtol=1e-4, atol=1e-5)
    whole = embeddings(str(model), HERE, normalize=False, dtype="float64")("x")["embedding"]
    assert abs(sum(value**2 for value in whole) - 1) > 1e-3


def test_texts_that_are_too_long(model: Path) -> None:
    """Guards against a text that is quietly cut: that is an error, unless it is asked for."""
    long = "ab" * 200
    with pytest.raises(ValueError, match=r"400 tokens are more than the model's 256: --set truncate=true"):
        embeddings(str(model), HERE)([long, "a"])
    assert embeddings(str(model), HERE, truncate=True)(long) == embeddings(str(model), HERE)(long[:256])
    with pytest.raises(ValueError, match="no tokens"):
        embeddings(str(model), HERE)("")


@pytest.mark.parametrize("several", [False, True])
def test_classification(tmp_path: Path, model: Path, several: bool) -> None:
    """Guards classes: probabilities and labels are those of the model, alone and in a list, of one text and of two."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        LlamaConfig,
        LlamaForSequenceClassification,
    )

    torch.manual_seed(0)
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = LlamaConfig.from_pretrained(
        model, num_labels=3, id2label=labels, problem_type="multi_label_classification" if several else None
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    call = classification(str(tmp_path), HERE)
    found = call([*TEXTS, {"text": "a", "pair": "b"}])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for item, row in zip([(text, None) for text in TEXTS] + [("a", "b")], found, strict=True):
        with torch.inference_mode():
            logits = network(**tokenizer(*item, return_tensors="pt")).logits[0]
        want = logits.sigmoid() if several else logits.softmax(-1)
        assert {label: pytest.approx(want[at].item(), rel=1e-4) for at, label in labels.items()} == row["scores"]
        assert row["label"] == labels[int(want.argmax())]
        assert row["score"] == max(row["scores"].values())
    assert list(classification(str(tmp_path), HERE, top_k=1)("a")["scores"]) == [call("a")["label"]]


@pytest.mark.parametrize(
    ("kind", "labels"), [(None, 1), ("regression", 1), ("regression", 2), ("multi_label_classification", 1)]
)
def test_scores_are_those_of_transformers(tmp_path: Path, model: Path, kind: str | None, labels: int) -> None:
    """Guards rerankers, whose one logit a softmax makes 1 of for every text, and regressions, which aren't shares."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, pipeline

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(model, num_labels=labels, problem_type=kind)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    found = classification(str(tmp_path), HERE)(TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        (want,) = pipeline("text-classification", str(tmp_path), device="cpu", dtype="float32", top_k=None)([text])
        assert row["scores"] == {each["label"]: pytest.approx(each["score"], rel=1e-4) for each in want}
    assert len({row["score"] for row in found}) == len(TEXTS)


@pytest.mark.parametrize(
    ("factory", "settings", "words"),
    [
        (embeddings, {"normalize": "False"}, "normalize must be true or false, not 'False'"),
        (embeddings, {"truncate": 1}, "truncate must be true or false, not 1"),
        (classification, {"truncate": "no"}, "truncate must be true or false, not 'no'"),
        (classification, {"top_k": 0}, "top_k must be a whole number of at least 1, not 0"),
        (classification, {"top_k": True}, "top_k must be a whole number"),
        (classification, {"top_k": "3x"}, "top_k must be a whole number"),
        (text_to_image, {"format": "bitmap"}, "format must be one that Pillow can save"),
        (text_to_image, {"format": "../png"}, "format must be one that Pillow can save"),
    ],
)
def test_settings_are_checked_before_a_model_is_loaded(factory: Any, settings: dict[str, Any], words: str) -> None:
    """Guards against text that is taken for true, and against a setting that fails every item."""
    with pytest.raises(ValueError, match=re.escape(words)):
        factory("there is no such model", HERE, **settings)


def test_formats_by_their_usual_names() -> None:
    """Guards jpg, which Pillow knows as JPEG alone."""
    assert [kind_of(name) for name in ("png", "jpg", "JPEG", "webp")] == ["PNG", "JPEG", "JPEG", "WEBP"]


@pytest.mark.slow
def test_on_ranks(model: Path) -> None:
    """Guards the way through processes: two ranks that import torch once, each with a model of its own, in batches."""
    settings = {"model": str(model), "pooling": "last"}
    with shardwise.map(embeddings, TEXTS * 3, "dp2", settings=settings, batch_size=2, device="cpu") as results:
        found = [each.output["embedding"] for each in results]
    for at, row in enumerate(found):
        assert row == pytest.approx(found[at % 3], abs=1e-5)


def test_items_and_extras() -> None:
    """Guards users from fields that are ignored, and from a missing extra that isn't named."""
    with pytest.raises(ValueError, match=r"unknown field 'sed'; did you mean 'seed'"):
        fields_of({"prompt": "x", "sed": 1}, "prompt", ("seed",))
    for item in (3, {"seed": 1}, {"prompt": 1}):
        with pytest.raises(ValueError, match='an object with "prompt"'):
            fields_of(item, "prompt", ("seed",))
    with pytest.raises(ValueError, match=r"needs no_such_module: pip install 'shardwise\[images\]'"):
        need("images", "json", "no_such_module")
    with pytest.raises(ValueError, match="pooling must be one of"):
        embeddings("x", HERE, pooling="max")


@pytest.mark.slow
def test_text_to_image(tmp_path: Path) -> None:
    """a8: guards images: a file per prompt, of its own seed, the same on any rank, and as diffusers draws it."""
    from diffusers import DiffusionPipeline
    from PIL import Image

    folder = save_pipeline(tmp_path / "model")
    items: list[Any] = [
        "a dog",
        "a cat",
        {"prompt": "a fox", "seed": 7},
        {"prompt": "a hen", "steps": 3},
        {"prompt": "x", "no": 1},
    ]
    settings = {"model": str(folder), "steps": 2, "seed": 40, "height": 64, "width": 64}
    found: dict[str, list[shardwise.Mapped]] = {}
    for layout, size in (("1", None), ("dp2", None), ("dp2", 2)):
        out = tmp_path / f"{layout}{size}"
        options = {"settings": {**settings, "out": str(out)}, "batch_size": size, "device": "cpu", "threads": 1}
        with shardwise.map(text_to_image, items, layout, **options) as results:
            found[out.name] = list(results)
        assert sorted(path.name for path in out.iterdir()) == [f"{index:06d}.png" for index in range(4)]
    for each in found["1None"][:4]:
        other, batch = (found[name][each.index] for name in ("dp2None", "dp22"))
        assert each.output["seed"] == other.output["seed"] == [40, 41, 7, 43][each.index]
        assert Path(each.output["image"]).read_bytes() == Path(other.output["image"]).read_bytes()
        pixels = [torch.tensor(list(Image.open(entry.output["image"]).tobytes())) for entry in (each, batch)]
        assert int((pixels[0] - pixels[1]).abs().max()) <= 1  # a batch may round otherwise
    assert all(entries[4].error is not None for entries in found.values())
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(7)
    torch.set_num_threads(1)
    want = pipeline("a fox", num_inference_steps=2, height=64, width=64, generator=noise).images[0]
    assert Image.open(found["dp2None"][2].output["image"]).tobytes() == want.tobytes()


def test_a_pipeline_with_code_is_refused(tmp_path: Path) -> None:
    """R2: guards against a model directory that names a module to import, or brings one."""
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["os", "system"], "vae": ["diffusers", "AutoencoderKL"]}
    canary = tmp_path / "ran"
    for names, code in ((index, None), ({**index, "unet": ["diffusers", "UNet2DConditionModel"]}, "pipeline.py")):
        (tmp_path / "model_index.json").write_text(json.dumps(names))
        if code is not None:
            (tmp_path / code).write_text(f"open({str(canary)!r}, 'w')")
        with pytest.raises(ValueError, match=f"brings code of its own.*{code or 'os'}"):
            text_to_image(str(tmp_path), HERE, out=str(tmp_path / "out"))
    (tmp_path / "model_index.json").unlink()
    with pytest.raises(ValueError, match=r"no model_index.json"):
        text_to_image(str(tmp_path), HERE, out=str(tmp_path / "out"))
    assert not canary.exists()
