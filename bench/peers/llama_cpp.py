"""llama.cpp through llama-cpp-python's low-level calls: B sequences in one batch, greedy by numpy's argmax.

Runs under any interpreter that has llama_cpp and numpy, and needs nothing else of the project but the protocol.
"""

from __future__ import annotations

import argparse
import ctypes
from typing import Any

import llama_cpp as llama
import numpy as np

from bench.peers.protocol import Clock, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--kv", default="f16", choices=("f16", "f32"))
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024, help="most tokens of one sequence")
    args = parser.parse_args()

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(args.model.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp can't load {args.model}")
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    contexts: dict[int, Any] = {}

    def context(sequences: int) -> Any:
        """A context for so many sequences; several are kept, so that one sequence never pays for 32."""
        if sequences not in contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = args.context * sequences
            params.n_batch = 2048
            params.n_ubatch = args.ubatch
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = args.threads
            params.flash_attn_type = int(args.flash)
            params.kv_unified = args.unified
            params.type_k = params.type_v = llama.GGML_TYPE_F16 if args.kv == "f16" else llama.GGML_TYPE_F32
            params.no_perf = True
            contexts[sequences] = llama.llama_init_from_model(model, params)
            if not contexts[sequences]:
                raise SystemExit("llama.cpp can't make a context")
        return contexts[sequences]

    space = llama.llama_batch_init(2048, 0, 1)

    def decode(ctx: Any, rows: list[list[int]], start: int) -> list[int]:
        """One llama_decode of every sequence's new tokens; the likeliest next token of each."""
        at = 0
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                space.token[at] = token
                space.pos[at] = start + offset
                space.n_seq_id[at] = 1
                space.seq_id[at][0] = sequence
                space.logits[at] = offset == len(tokens) - 1
                at += 1
        space.n_tokens = at
        if llama.llama_decode(ctx, space) != 0:
            raise SystemExit("llama_decode failed")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(ctx), shape=(len(rows), vocabulary))
        return [int(token) for token in logits.argmax(1)]

    def answer(prompts: list[list[int]], new: int) -> dict[str, Any]:
        ctx = context(len(prompts))
        llama.llama_memory_clear(llama.llama_get_memory(ctx), False)
        length = len(prompts[0])
        clock = Clock()
        tokens = decode(ctx, prompts, 0)
        clock()
        ids = [[token] for token in tokens]
        for step in range(new - 1):
            tokens = decode(ctx, [[token] for token in tokens], length + step)
            clock()
            for row, token in zip(ids, tokens, strict=True):
                row.append(token)
        return clock.answer(ids)

    serve(
        answer,
        f"llama-cpp-python {llama.__version__}, flash {args.flash}, unified {args.unified}, kv {args.kv}, "
        f"ubatch {args.ubatch}",
    )


if __name__ == "__main__":
    main()
