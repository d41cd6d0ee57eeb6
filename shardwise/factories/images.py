"""Images from prompts, with any text-to-image pipeline of diffusers: one file per prompt.

The noise of an image is drawn on the CPU from its own seed: it doesn't depend on the rank, the layout or the batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, pipelines
from PIL import Image

from shardwise.factories.loading import dtype_of, fields_of
from shardwise.mapping.config import Place

FIELDS = ("seed", "negative_prompt", "steps", "guidance", "height", "width")
NAMES = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
"""As diffusers calls them."""


def text_to_image(
    model: str,
    place: Place,
    out: str = "images",
    *,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    negative_prompt: str | None = None,
    height: int | None = None,
    width: int | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    variant: str | None = None,
    format: str = "png",
) -> Callable[..., Any]:
    """A pipeline on ``place``; an item is a prompt, or an object with "prompt" and any of `FIELDS`.

    ``model`` is a directory or a hub id; only safetensors are read, and code in it is refused. ``out`` is the images'
    directory, and a file's name is its item's index. ``seed`` plus the index is the seed of an item that names none.
    What is None is the pipeline's own default. An item's output is {"image": path, "seed": seed}, and "flagged" where
    the pipeline's checker has blackened the image. With a batch size prompts of equal options run together.
    """
    coding = kind_of(format)
    kind: Any = DiffusionPipeline
    source = _fetch(model, revision, variant)
    pipeline = kind.from_pretrained(
        *(source,), torch_dtype=dtype_of(dtype, place.device), variant=variant, use_safetensors=True
    )
    pipeline.to(place.device)
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if denoiser is not None:  # it runs once a step, everything else once an image
        place.compile(denoiser)
    pipeline.set_progress_bar_config(disable=True)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"negative_prompt": negative_prompt, "steps": steps, "guidance": guidance, "height": height, "width": width}

    def draw(prompts: list[str], seeds: list[int], options: Mapping[str, Any]) -> list[Any]:
        named = {NAMES.get(key, key): value for key, value in options.items() if value is not None}
        if "negative_prompt" in named:
            named["negative_prompt"] = [named["negative_prompt"]] * len(prompts)
        noise = [torch.Generator("cpu").manual_seed(each) for each in seeds]
        result = pipeline(prompts, generator=noise, **named)
        return list(
            zip(result.images, getattr(result, "nsfw_content_detected", None) or [False] * len(prompts), strict=True)
        )

    def save(image: Any, index: int) -> str:
        path = folder / f"{index:06d}.{format}"
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        image.save(unfinished, format=coding)
        unfinished.replace(path)  # no half image under the name
        return str(path)

    def call(item: Any, index: Any) -> Any:
        if not isinstance(item, list):
            return call([item], [index])[0]
        asked = [fields_of(each, "prompt", FIELDS) for each in item]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, fields in enumerate(asked):
            groups.setdefault(tuple(fields.get(key, value) for key, value in own.items()), []).append(position)
        outputs: list[Any] = [None] * len(item)
        for options, positions in groups.items():
            seeds = [asked[at].get("seed", seed + index[at]) for at in positions]
            images = draw([asked[at]["prompt"] for at in positions], seeds, dict(zip(own, options, strict=True)))
            for at, number, (image, flagged) in zip(positions, seeds, images, strict=True):
                outputs[at] = {
                    "image": save(image, index[at]),
                    "seed": number,
                    **({"flagged": True} if flagged else {}),
                }
        return outputs

    return call


def kind_of(format: str) -> str:
    """Pillow's name for it, by that or by its usual end: jpg is JPEG. ValueError for one that it can't save."""
    kind = Image.registered_extensions().get(f".{format}".lower(), str(format))
    try:
        Image.new("RGB", (1, 1)).save(BytesIO(), format=kind)
    except (KeyError, OSError, ValueError):
        raise ValueError(f"--set format must be one that Pillow can save, such as png or jpg, not {format!r}") from None
    return kind


def _fetch(model: str, revision: str | None, variant: str | None) -> str:
    """The pipeline's directory. Raises ValueError for one that brings code, or names it elsewhere."""
    kind: Any = DiffusionPipeline
    if Path(model).is_dir():
        folder = model
    else:
        folder = kind.download(model, revision=revision, variant=variant, use_safetensors=True)
    code = [path.name for path in Path(folder).rglob("*.py")]
    try:
        parts = json.loads((Path(folder) / "model_index.json").read_text(encoding="utf-8"))
        named = [parts.pop("_class_name"), *(value[0] for value in parts.values() if isinstance(value, list))]
    except (OSError, ValueError, LookupError, AttributeError):
        raise ValueError(f"{model} is no pipeline: it has no model_index.json that names its parts") from None
    known = ("diffusers", "transformers", None)
    code += [str(each) for each in named[1:] if each not in known and not hasattr(pipelines, str(each))]
    if code or not isinstance(named[0], str):
        raise ValueError(f"{model} brings code of its own ({', '.join(code) or named[0]}), which is never run")
    return folder
