"""What a request may ask for, each with a sign that it was done; `python -m tests.features` writes docs/features.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.outputs import RequestOutput
from shardwise.params import SamplingParams

LAYOUTS = ("1", "tp2", "tp3", "pp2", "tp2.pp2", "dp2")
PROPOSERS = {
    "ngram": "prompt lookup",
    "draft": "a smaller model of the same vocabulary",
    "self,layers=2": "the model's own first layers",
    "self,dtype=bfloat16": "the model's own weights, rounded",
    "self,quantize=int4": "… to whole numbers",
}
COMPILED = {"compile=inductor": "layers go through torch.compile"}
LIMITS = {"max_memory": "layers beyond a rank's memory are used from disk"}
DOCS = Path(__file__).parent.parent / "docs" / "features.md"
PROMPT = "count to ten: one two three one two three one"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
Sign = Callable[[RequestOutput, RequestOutput], bool]
"""Of the answer, and of the answer to the same request without the field: was it done?"""


@dataclass(frozen=True)
class Feature:
    """A field of SamplingParams in use."""

    name: str
    what: str
    fields: dict[str, Any]
    sign: Sign
    base: dict[str, Any]
    """Fields of the request without it."""

    def params(self, without: bool = False) -> SamplingParams:
        start = {"max_tokens": 24, "ignore_eos": True}
        return SamplingParams(**{**start, **self.base, **({} if without else self.fields)})


def differs(answer: RequestOutput, plain: RequestOutput) -> bool:
    return answer.token_ids != plain.token_ids


def new_logprobs(answer: RequestOutput, plain: RequestOutput) -> bool:
    told = answer.outputs[0].logprobs
    return [item.token for item in told] == answer.token_ids and all(len(item.top) == 3 for item in told)


def is_json(answer: RequestOutput, plain: RequestOutput) -> bool:
    """A text that the length cut is JSON as far as it goes: then the whole of it was tested elsewhere."""
    try:
        return isinstance(json.loads(answer.text), dict)
    except ValueError:
        return answer.finish_reason == "length" and answer.text.lstrip().startswith("{")


def fits_schema(answer: RequestOutput, plain: RequestOutput) -> bool:
    return is_json(answer, plain) and answer.text.startswith('{"name"')


def feature(name: str, what: str, sign: Sign = differs, base: dict[str, Any] | None = None, **fields: Any) -> Feature:
    return Feature(name, what, fields, sign, base or {})


HOT = {"temperature": 1.5, "seed": 3}
FIELDS = (
    feature("max_tokens", "most tokens to generate", lambda a, p: len(a.token_ids) == 5, max_tokens=5),
    feature("max_tokens=0", "score a prompt only", lambda a, p: a.token_ids == [] and a.text == "", max_tokens=0),
    feature("temperature", "sampling", base={"seed": 3}, temperature=1.5),
    feature("top_k", "the k likeliest", base=HOT, top_k=2),
    feature("top_p", "the likeliest that hold p", base=HOT, top_p=0.3),
    feature("min_p", "relative to the best", base=HOT, min_p=0.5),
    feature("seed", "another seed, other tokens", base=HOT, seed=4),
    feature(
        "n",
        "several continuations, the first as alone",
        lambda a, p: a.token_ids == p.token_ids and len({tuple(part.token_ids) for part in a.outputs}) == 3,
        base=HOT,
        n=3,
    ),
    feature("presence_penalty", "generated tokens, once", presence_penalty=2.0),
    feature("frequency_penalty", "generated tokens, each time", frequency_penalty=2.0),
    feature("repetition_penalty", "prompt and generated tokens", repetition_penalty=3.0),
    feature("logit_bias", "added to logits", lambda a, p: a.token_ids.count(70) == 24, logit_bias={70: 100}),
    feature(
        "allowed_token_ids",
        "nothing else",
        lambda a, p: set(a.token_ids) <= {65, 66, 67} and len(set(a.token_ids)) > 1,
        base=HOT,
        allowed_token_ids=(65, 66, 67),
    ),
    feature(
        "bad_words",
        "never these texts",
        lambda a, p: "ab" in p.text and "ab" not in a.text,
        base={**HOT, "allowed_token_ids": (64, 65)},  # "a" and "b" in the text model's vocabulary
        bad_words=("ab",),
    ),
    feature(
        "min_tokens",
        "no end before",
        lambda a, p: len(p.token_ids) < 7 <= len(a.token_ids),
        base={"ignore_eos": False, "logit_bias": {258: 100}},
        min_tokens=6,
    ),
    feature(
        "ignore_eos",
        "go on past the end",
        lambda a, p: len(p.token_ids) == 1 and len(a.token_ids) == 24,
        base={"ignore_eos": False, "logit_bias": {258: 100}},
        ignore_eos=True,
    ),
    feature(
        "stop",
        "end before a text",
        lambda a, p: a.finish_reason == "stop" and a.text in p.text and "a" not in a.text,
        base={**HOT, "allowed_token_ids": tuple(range(60, 90))},
        stop=("a",),
    ),
    feature(
        "stop_token_ids",
        "end at a token",
        lambda a, p: a.finish_reason == "stop" and a.token_ids[-1] == 70,
        base={**HOT, "allowed_token_ids": tuple(range(66, 74))},
        stop_token_ids=(70,),
    ),
    feature("logprobs", "of generated tokens", new_logprobs, logprobs=3),
    feature(
        "prompt_logprobs",
        "of the prompt's tokens",
        lambda a, p: [item.token for item in a.prompt_logprobs] == a.prompt_token_ids[1:],
        prompt_logprobs=2,
    ),
    feature(
        "skip_special_tokens",
        "or let them stand in the text",
        lambda a, p: a.text.count("<s>") == 24 and p.text == "",
        base={"logit_bias": {257: 100}},
        skip_special_tokens=False,
    ),
    feature("echo", "the text begins with the prompt", lambda a, p: a.text == PROMPT + p.text, echo=True),
)
GRAMMARS = (
    feature("json_schema", "JSON of a schema", fits_schema, base={"max_tokens": 60, **HOT}, json_schema=SCHEMA),
    feature("json_object", "a JSON object", is_json, base={"max_tokens": 60, **HOT}, json_object=True),
    feature(
        "regex", "an expression", lambda a, p: bool(re.fullmatch(r"[a-f]{4}-\d+x", a.text)), regex=r"[a-f]{4}-[0-9]{2}x"
    ),
    feature("ebnf", "GBNF or Lark", lambda a, p: set(a.text) <= set("xyz"), base=HOT, ebnf='root ::= ("x" | "yz")+'),
    feature("choice", "one of these", lambda a, p: a.text in ("yes", "no", "maybe"), choice=("yes", "no", "maybe")),
)
FEATURES = (*FIELDS, *GRAMMARS)


def document() -> str:
    """docs/features.md: a test stands behind every mark, in tests/test_features.py."""
    head = [f"| | what it does | {' | '.join(LAYOUTS)} |", f"|---|---|{'---|' * len(LAYOUTS)}"]
    marks = " | ".join("✓" for _ in LAYOUTS)
    lines = [
        "# Features and layouts",
        "",
        "Every mark is a test (`tests/test_features.py`, which also keeps this file up to date): the request runs on",
        "the layout in one batch with all the others, plainly and with each proposer, and has the tokens, text and",
        "log-probabilities that it has alone on one device without drafts.",
        "",
        "## Fields of a request",
        "",
        *head,
        *(f"| `{item.name}` | {item.what} | {marks} |" for item in FIELDS),
        "",
        "## Grammars",
        "",
        *head,
        *(f"| `{item.name}` | {item.what} | {marks} |" for item in GRAMMARS),
        "",
        "## Proposers of drafts",
        "",
        "Each with all of the above, with `accept=coupled`; with `accept=optimal` tokens are other ones of the same",
        "distribution, and with a fixed `k` again the same on all layouts, as long as KV blocks don't run short and",
        "no rank fails.",
        "",
        *head,
        *(f"| `{name}` | {what} | {marks} |" for name, what in PROPOSERS.items()),
        "",
        "## Limits",
        "",
        "With all fields and grammars again.",
        "",
        *head,
        *(f"| `{name}` | {what} | {marks} |" for name, what in LIMITS.items()),
        "",
        "## Compiled",
        "",
        "With all fields and grammars again.",
        "",
        *head,
        *(f"| `{name}` | {what} | {marks} |" for name, what in COMPILED.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    DOCS.write_text(document(), encoding="utf-8")
