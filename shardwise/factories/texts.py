"""Embeddings and classes of texts, with the models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from shardwise.factories.loading import check_flags, dtype_of, fields_of
from shardwise.mapping.config import Place

POOLINGS = ("mean", "first", "last")


def embeddings(
    model: str,
    place: Place,
    *,
    pooling: str = "mean",
    normalize: bool = True,
    truncate: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
) -> Callable[[Any], Any]:
    """An encoder on ``place``; an item is a text, or an object with "text", and its output {"embedding": […]}.

    The embedding is the ``pooling`` of the last hidden states: the mean over the tokens, or the first or last of them;
    a unit vector if ``normalize``. Texts longer than the model's positions are errors unless ``truncate``. Only
    safetensors are read, and no code of the model's is run.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"--set pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
    check_flags(normalize=normalize, truncate=truncate)
    network, encode = _load("AutoModel", model, place, dtype, revision, truncate)

    def call(item: Any) -> Any:
        if not isinstance(item, list):
            return call([item])[0]
        with torch.inference_mode():
            inputs = encode([fields_of(each, "text", ())["text"] for each in item], None)
            hidden = network(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"]  # padded on the right
            if pooling == "mean":
                weights = mask.unsqueeze(-1).float()
                rows = (hidden * weights).sum(1) / weights.sum(1)
            else:
                at = mask.sum(1) - 1 if pooling == "last" else torch.zeros_like(mask[:, 0])
                rows = hidden[torch.arange(len(item), device=hidden.device), at]
            rows = torch.nn.functional.normalize(rows, dim=-1) if normalize else rows
        return [{"embedding": row} for row in rows.tolist()]

    return call


def classification(
    model: str,
    place: Place,
    *,
    top_k: int | None = None,
    truncate: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
) -> Callable[[Any], Any]:
    """A classifier on ``place``; an item is a text, or an object with "text" and perhaps "pair", a second text.

    The output is {"label", "score", "scores"}: the likeliest label, its probability, and those of all labels, or of the
    ``top_k``. Probabilities are as transformers' pipeline has them: a softmax, or a sigmoid of each for a model of one
    label or of several at once; of a regression, the values themselves. Only safetensors are read, and no code of the
    model's is run.
    """
    check_flags(truncate=truncate)
    if top_k is not None and (type(top_k) is not int or top_k < 1):  # True is an int too
        raise ValueError(f"--set top_k must be a whole number of at least 1, not {top_k!r}")
    network, encode = _load("AutoModelForSequenceClassification", model, place, dtype, revision, truncate)
    labels, kind = network.config.id2label, network.config.problem_type
    alone = kind == "multi_label_classification" or len(labels) == 1

    def call(item: Any) -> Any:
        if not isinstance(item, list):
            return call([item])[0]
        asked = [fields_of(each, "text", ("pair",)) for each in item]
        if len({"pair" in fields for fields in asked}) > 1:
            return [call([each])[0] for each in item]
        pairs = [fields["pair"] for fields in asked] if "pair" in asked[0] else None
        with torch.inference_mode():
            logits = network(**encode([fields["text"] for fields in asked], pairs)).logits.float()
            scores = logits if kind == "regression" else logits.sigmoid() if alone else logits.softmax(-1)
        return [_ranked(dict(zip(labels.values(), row, strict=True)), top_k) for row in scores.tolist()]

    return call


def _ranked(scores: dict[str, float], top_k: int | None) -> dict[str, Any]:
    ordered = dict(sorted(scores.items(), key=lambda pair: -pair[1])[:top_k])
    label = next(iter(ordered))
    return {"label": label, "score": ordered[label], "scores": ordered}


def _load(
    kind: str, model: str, place: Place, dtype: str, revision: str | None, truncate: bool
) -> tuple[Any, Callable[[list[str], list[str] | None], Any]]:
    """The model, and what makes its inputs of texts."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    tokenizer.padding_side = "right"
    network: Any = getattr(transformers, kind).from_pretrained(
        model, dtype=dtype_of(dtype, place.device), revision=revision, use_safetensors=True, trust_remote_code=False
    )
    place.compile(network.eval().to(place.device))
    config = network.config
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"{model}: its tokenizer has no token to pad with, nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id  # classifiers of decoders look for the last token before it
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or 1 << 30)

    cut = {"truncation": True, "max_length": longest} if truncate else {"truncation": False}

    def encode(texts: list[str], pairs: list[str] | None) -> Any:
        for text, ids in zip(texts, tokenizer(texts, pairs, verbose=False, **cut)["input_ids"], strict=True):
            if len(ids) > longest:
                raise ValueError(
                    f"{len(ids)} tokens are more than the model's {longest}: --set truncate=true cuts them off"
                )
            if not ids:
                raise ValueError(f"{text!r} has no tokens")
        return tokenizer(texts, pairs, padding=True, return_tensors="pt", **cut).to(place.device)

    return network, encode
