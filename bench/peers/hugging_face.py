"""transformers: greedy decoding with a KV cache, equal-length prompts as one batch."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from bench.peers.protocol import Clock, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="best", choices=("best", "sdpa", "eager"))
    parser.add_argument("--mode", default="loop", choices=("generate", "loop", "static", "compiled"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    forward = torch.compile(model) if args.mode == "compiled" else model

    def answer(prompts: list[list[int]], new: int) -> dict[str, Any]:
        eager_wins = args.dtype == "bfloat16" and len(prompts) > 1  # measured; bench/README.md
        best = "eager" if eager_wins else "sdpa"
        model.set_attn_implementation(best if args.attention == "best" else args.attention)
        return (generate if args.mode == "generate" else loop)(prompts, new)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> dict[str, Any]:
        """``model.generate``, with a stopping criterion that only looks at the clock."""
        ids = torch.tensor(prompts)
        clock = Clock()

        def tick(seen: torch.Tensor, scores: object) -> torch.Tensor:
            clock()
            return torch.zeros(len(prompts), dtype=torch.bool)

        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=[tick],
        )
        return clock.answer(out[:, ids.shape[1] :].tolist())

    @torch.inference_mode()
    def loop(prompts: list[list[int]], new: int) -> dict[str, Any]:
        """The bare model call in a loop: what generate does, without its bookkeeping."""
        ids = torch.tensor(prompts)
        length = ids.shape[1] + new
        clock = Clock()
        cache = (
            DynamicCache(config=model.config)
            if args.mode == "loop"
            else StaticCache(config=model.config, max_cache_len=-(-length // 128) * 128)
        )
        rows = []
        for step in range(new):
            call = forward if step else model
            logits = call(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            rows.append(ids)
            clock()
        return clock.answer(torch.cat(rows, 1).tolist())

    serve(answer, f"transformers {transformers.__version__}, {args.mode}, attention {args.attention}")


if __name__ == "__main__":
    main()
