"""The tensor-parallel Llama recipe: every rank has a part of each layer, one of them draws, and all get its tokens.

python examples/tensor_parallel_llama.py [MODEL] [LAYOUT]
"""

import sys

from shardwise import LLM, SamplingParams
from shardwise.recipes.recipe import open_recipe


def main(model: str = "smollm2", layout: str = "tp2") -> None:
    """Print the answer, and what it took of each rank."""
    recipe, _ = open_recipe("llama3-70b", [f"model={model}", f"layout={layout}", "dtype=auto", "kv_tokens=2048"])
    messages = [*(recipe.before or ()), {"role": "user", "content": recipe.prompts[0]}]
    with LLM(recipe.model, **recipe.settings) as llm:
        (result,) = llm.chat(messages, SamplingParams(**recipe.sampling))
        answer = result.outputs[0]
        print(answer.text)
        seconds = result.finished - result.first_token
        rate = (len(answer.token_ids) - 1) / seconds if seconds else 0.0
        whole = result.finished - result.submitted
        print(f"{len(answer.token_ids)} tokens in {whole:.2f} s, {rate:.1f} tokens/s", file=sys.stderr)
        for number, rank in enumerate(llm.plan.ranks):
            reads = rank.weight_bytes * rate / 1e9
            print(
                f"rank {number}: {rank.weight_bytes / 1e6:.1f} MB of weights, {reads:.2f} GB/s of them", file=sys.stderr
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
