"""What a grammar costs: compilation, and mask and advance per token, beside the model's own step.

    python -m bench.grammar [--threads 2] [--rounds 5] [--json]

The tokens are those of a text that fits, as SmolLM2's tokenizer of 49 152 tokens writes it. The front process makes a
mask before each step of a sequence; the step beside it is a decode step of one sequence of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from bench.machine import machine
from shardwise.grammar import Grammars
from shardwise.llm import LLM
from shardwise.params import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10},
        "kind": {"enum": ["student", "teacher", None]},
        "home": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
    },
    "required": ["name", "age", "email", "tags", "kind", "home"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        }
    },
}
SOMEONE = {
    "name": "Ada Lovelace",
    "age": 36,
    "email": "ada@analytical.engine.org",
    "tags": ["mathematics", "poetry", "the first programs"],
    "kind": "teacher",
    "home": {"street": "12 St James's Square", "zip": "10023"},
}
WIDE = {
    "type": "object",
    "properties": {f"field_{number}": {"type": ["string", "null"]} for number in range(200)},
    "additionalProperties": False,
}
ARITHMETIC = 'start: sum\nsum: sum /[-+]/ term | term\nterm: "(" sum ")" | /[0-9]+/\n%ignore / +/'
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "json_object": ({"json_object": True}, json.dumps({"people": [SOMEONE, SOMEONE]})),
    "person": ({"json_schema": PERSON}, json.dumps(SOMEONE)),
    "200 optional": ({"json_schema": WIDE}, json.dumps({f"field_{at}": "some words here" for at in range(0, 200, 20)})),
    "enum of 1000": ({"json_schema": {"enum": [f"value {at:04}" for at in range(1000)]}}, '"value 0421"'),
    "date regex": (
        {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?(Z|[+-]\d{2}:\d{2})"},
        "2024-02-29T12:30:59+01:00",
    ),
    "any text": ({"regex": "(?s).*"}, "It was a bright cold day in April, and the clocks were striking thirteen."),
    "Lark sums": ({"ebnf": ARITHMETIC}, "(12 + 345) - (6 + (78 - 9)) + 1011"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with LLM("smollm2", threads=args.threads) as llm:
        step = decode_step(llm, args.rounds)
        tokenizer, size, eos = llm.tokenizer, llm.source.config.vocab_size, llm.eos
    began = time.perf_counter()
    owner = Grammars(tokenizer, size, eos)
    owner.compile(SamplingParams(json_object=True), eos)
    trie = time.perf_counter() - began
    rows = []
    for name, (fields, text) in CASES.items():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        rows.append({"case": name, "tokens": len(tokens), **measure(owner, fields, tokens, eos, args.rounds)})
    for row in rows:
        row["percent_of_step"] = round(row["median_us"] / step / 10, 2)
    document = {
        "machine": machine(),
        "threads": args.threads,
        "step_ms": round(step, 3),
        "start_ms": round(trie * 1e3, 1),
        "rows": rows,
    }
    print(json.dumps(document)) if args.json else show(document)


def decode_step(llm: LLM, rounds: int) -> float:
    """Milliseconds of a decode step of one sequence, the median of the rounds' means."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    means = []
    for _ in range(rounds):
        result = llm.generate("The clocks were striking", params)[0]
        means.append((result.finished - result.first_token) / (len(result.token_ids) - 1))
    return statistics.median(means) * 1e3


def measure(
    owner: Grammars, fields: dict[str, Any], tokens: list[int], eos: frozenset[int], rounds: int
) -> dict[str, Any]:
    """Each round compiles anew, as each request does: compile ms and µs of mask and advance together."""
    params = SamplingParams(**fields)
    compiles, took = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        matcher = owner.compile(params, eos)
        compiles.append(time.perf_counter() - began)
        for token in [*tokens, min(eos)]:
            began = time.perf_counter()
            matcher.mask()
            fits = matcher.advance(token)
            took.append(time.perf_counter() - began)
            assert fits
    took.sort()
    return {
        "first_compile_ms": round(compiles[0] * 1e3, 2),
        "compile_ms": round(statistics.median(compiles) * 1e3, 2),
        "median_us": round(statistics.median(took) * 1e6, 1),
        "p99_us": round(took[len(took) * 99 // 100] * 1e6, 1),
    }


def show(document: dict[str, Any]) -> None:
    """Print for people."""
    print(f"import and trie {document['start_ms']:.0f} ms, once; a decode step takes {document['step_ms']:.2f} ms")
    print(f"{'grammar':>14} tokens  first compile ms  compile ms  mask+advance µs: median    p99  % of a step")
    for row in document["rows"]:
        print(
            f"{row['case']:>14} {row['tokens']:>6} {row['first_compile_ms']:>17.2f} {row['compile_ms']:>11.2f} "
            f"{row['median_us']:>24.1f} {row['p99_us']:>6.0f} {row['percent_of_step']:>12.2f}"
        )
    print(document["machine"])


if __name__ == "__main__":
    main()
