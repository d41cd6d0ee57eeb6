"""Speculation against plain decoding on SmolLM2-135M: speed, acceptance and tokens per round, by turns in one run.

    python -m bench.speculate [--dtypes float32,bfloat16] [--batches 1,8] [--rounds 5] [--new 128] [--json]

"copy" is a text that stands in the prompt twice and is begun a third time, which the model copies; "prose" goes on from
pieces of ordinary English. Drafts on and off take turns in the same engine, and ratios are of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.machine import machine
from shardwise import LLM, SamplingParams
from shardwise.verify import TEXT

PROPOSERS = {
    "float32": ("ngram", "ngram,k=4", "self", "self,k=3", "self,k=6", "self,layers=24", "self,layers=24,k=3"),
    "bfloat16": ("ngram", "ngram,k=4", "self,layers=24", "self,layers=24,k=3"),
}
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layout", default="1")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--proposers", nargs="*", help="as for --speculate; default: a choice for each dtype")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    rows = [row for dtype in args.dtypes.split(",") for row in measure(args, dtype)]
    document = {"machine": machine(), "layout": args.layout, "new": args.new, "rounds": args.rounds, "rows": rows}
    print(json.dumps(document)) if args.json else show(document)


def workloads(llm: LLM, batch: int) -> dict[str, list[list[int]]]:
    """Prompts in tokens: ``batch`` different ones of each kind."""
    encode = llm.tokenizer.encode
    words, licence = TEXT.split(), encode((ROOT / "LICENSE").read_text())
    copies = []
    for number in range(batch):
        turned = " ".join(words[7 * number :] + words[: 7 * number])
        copies.append(encode(f"{turned}\n\n{turned}\n\n{' '.join(turned.split()[:8])}"))
    stride = (len(licence) - 64) // batch
    return {"copy": copies, "prose": [licence[at * stride : at * stride + 64] for at in range(batch)]}


def measure(args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """A row for each proposer, workload and batch size; one engine is loaded at a time."""
    by = SamplingParams(max_tokens=args.new, temperature=args.temperature, seed=7, ignore_eos=True)
    rows = []
    for proposer in args.proposers or PROPOSERS[dtype]:
        with LLM(args.model, args.layout, dtype=dtype, speculate=proposer) as llm:
            for batch in map(int, args.batches.split(",")):
                for kind, prompts in workloads(llm, batch).items():
                    rows.append({"dtype": dtype, "text": kind, "batch": batch, "proposer": proposer})
                    rows[-1] |= compare(llm, prompts, by, args.rounds, coupled="optimal" not in proposer)
                    print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def compare(llm: LLM, prompts: list[list[int]], by: SamplingParams, rounds: int, coupled: bool) -> dict[str, Any]:
    """Medians with drafts and without, by turns in the same engine; ``ratio`` is of the speeds in the same round.

    ``coupled``: the tokens have to be the same, which accept=optimal does not promise.
    """
    schedulers = [engine.scheduler for engine in llm._replicas.engines]
    drafts = [scheduler.drafts for scheduler in schedulers]
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        found = {}
        for on in (True, False) if number % 2 else (False, True):
            for scheduler, own in zip(schedulers, drafts, strict=True):
                scheduler.drafts = own if on else None
            found[on] = llm.generate(prompts, by)
            decoding = max(out.finished for out in found[on]) - min(out.first_token for out in found[on])
            if number:  # the first round warms up
                took[on].append(decoding)
        same = [a.token_ids == b.token_ids for a, b in zip(found[True], found[False], strict=True)]
        assert all(same) or not coupled, "speculation changed a token"
    for scheduler, own in zip(schedulers, drafts, strict=True):
        scheduler.drafts = own
    tallies = [out.outputs[0].drafts for out in found[True]]
    proposed = sum(tally.proposed for tally in tallies if tally is not None)
    accepted = sum(tally.accepted for tally in tallies if tally is not None)
    verified = sum(sum(tally.rounds) for tally in tallies if tally is not None)
    ratios = sorted(off / on for on, off in zip(took[True], took[False], strict=True))
    speeds = {on: round(len(prompts) * (by.max_tokens - 1) / statistics.median(took[on]), 1) for on in took}
    return {
        "off_tokens_per_s": speeds[False],
        "on_tokens_per_s": speeds[True],
        "ratio": round(statistics.median(ratios), 2),
        "least": round(ratios[0], 2),
        "most": round(ratios[-1], 2),
        "accepted": round(accepted / proposed, 2) if proposed else None,
        "drafts_per_round": round(proposed / verified, 1) if verified else 0.0,
    }


def show(document: dict[str, Any]) -> None:
    """Print for people."""
    from rich.console import Console
    from rich.table import Table

    rows = document["rows"]
    table = Table(*rows[0], title=document["machine"])
    for entry in rows:
        table.add_row(*("" if value is None else str(value) for value in entry.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
