"""Speculation against plain decoding on SmolLM2-135M: speed, acceptance and tokens per round, by turns in one run.

    python -m bench.speculate [--dtypes float32,bfloat16] [--batches 1,8] [--rounds 5] [--new 128] [--json]

"copy" is a text that stands in the prompt twice and is begun a third time, which the model copies; "prose" goes on from
pieces of ordinary English. Each proposer is an engine of its own; they take turns, and ratios are of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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
    """A row for each workload, batch size and proposer."""
    proposers = args.proposers or PROPOSERS[dtype]
    llms = {None: LLM(args.model, args.layout, dtype=dtype)}
    llms |= {text: LLM(args.model, args.layout, dtype=dtype, speculate=text) for text in proposers}
    by = SamplingParams(max_tokens=args.new, temperature=args.temperature, seed=7, ignore_eos=True)
    rows = []
    for batch in map(int, args.batches.split(",")):
        for kind, prompts in workloads(llms[None], batch).items():
            took: dict[str | None, list[float]] = {text: [] for text in llms}
            texts = {}
            for number in range(args.rounds + 1):
                order = list(llms) if number % 2 else list(llms)[::-1]
                for text in order:
                    began = time.perf_counter()
                    found = llms[text].generate(prompts, by)
                    decoding = max(out.finished for out in found) - min(out.first_token for out in found)
                    assert began < found[0].finished
                    texts[text] = [out.token_ids for out in found]
                    tallies = [out.outputs[0].drafts for out in found]
                    if number:
                        took[text].append(decoding)
                    if number == args.rounds:
                        rows.append(row(dtype, kind, batch, text, args.new, took, tallies))
                    print(f"{dtype} {kind} {batch} {text}: {decoding:.2f} s", file=sys.stderr)
            assert all(found == texts[None] for found in texts.values()), "speculation changed a token"
    for llm in llms.values():
        llm.close()
    return rows


def row(
    dtype: str, kind: str, batch: int, text: str | None, new: int, took: dict[str | None, list[float]], tallies: Any
) -> dict[str, Any]:
    """Medians over the rounds; ``ratio`` is the speed over plain decoding's in the same round."""
    plain = took[None]
    ratios = sorted(a / b for a, b in zip(plain, took[text], strict=False))
    rounds = sum(sum(tally.rounds) for tally in tallies if tally is not None)
    proposed = sum(tally.proposed for tally in tallies if tally is not None)
    accepted = sum(tally.accepted for tally in tallies if tally is not None)
    return {
        "dtype": dtype,
        "text": kind,
        "batch": batch,
        "proposer": text or "off",
        "tokens_per_s": round(batch * (new - 1) / statistics.median(took[text]), 1),
        "ratio": round(statistics.median(ratios), 3) if ratios else 1.0,
        "least": round(ratios[0], 3) if ratios else 1.0,
        "most": round(ratios[-1], 3) if ratios else 1.0,
        "accepted": round(accepted / proposed, 3) if proposed else None,
        "drafts_per_round": round(proposed / rounds, 2) if rounds else 0.0,
        "share_of_tokens": round(accepted / (batch * new), 3),
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
