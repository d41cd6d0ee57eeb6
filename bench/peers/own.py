"""shardwise on any layout, through its offline door."""

from __future__ import annotations

import argparse
from typing import Any

import shardwise
from bench.peers.protocol import serve
from shardwise import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layout", default="1")
    parser.add_argument("--threads", type=int, default=2, help="per rank")
    parser.add_argument("--one-chunk", action="store_true", help="sum every linear as a single chunk (layout 1 only)")
    args = parser.parse_args()
    changed = _one_chunk() if args.one_chunk else []
    llm = LLM(
        args.model,
        args.layout,
        dtype=args.dtype,
        threads=args.threads,
        device="cpu",
        prefix_cache=False,  # a round must not profit from the one before
        max_batch_tokens=2048,  # all prompts start in one step, as they do in the peers
    )
    if args.one_chunk and not changed:
        raise SystemExit("--one-chunk changed nothing: the model was not built in this process")

    def answer(prompts: list[list[int]], new: int) -> dict[str, Any]:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
        first = max(output.first_token for output in outputs)
        # Pipeline stages may start the sequences in turn, so the rate is the sum of each sequence's own.
        rate = sum((new - 1) / (output.finished - output.first_token) for output in outputs) if new > 1 else 0.0
        tokens = len(outputs) * (new - 1)
        return {
            "ttft_s": first - min(output.submitted for output in outputs),
            "decode_s": tokens / rate if rate else 0.0,
            "tokens": tokens,
            "ids": [output.token_ids for output in outputs],
        }

    kernels = llm.figures[0][0]["kernels"]
    with llm:
        serve(answer, f"shardwise {shardwise.__version__}, layout {args.layout}, {args.threads} threads, {kernels}")


def _one_chunk() -> list[str]:
    """Rob the row-parallel linears of their trees as they are built; the list grows by each one robbed."""
    from shardwise.kernels.ops import Program
    from shardwise.models.linear import RowLinear

    build, changed = RowLinear.__init__, []

    def init(self: RowLinear, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        self.program = Program.whole(self.weight.cols)
        changed.append("row")

    RowLinear.__init__ = init  # type: ignore[method-assign]
    return changed


if __name__ == "__main__":
    main()
