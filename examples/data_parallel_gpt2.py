"""GPT-2 on two processes, each with the whole model: prompts are shared out, texts come back in order.

python examples/data_parallel_gpt2.py [MODEL]
torchrun --nproc-per-node 2 examples/data_parallel_gpt2.py [MODEL]
"""

import os
import sys
from collections.abc import Callable

import shardwise

PROMPTS = ["GPT2 is a model developed by OpenAI", "The lighthouse keeper wrote", "One, two,", "Dear diary,"]


def build(model: str, place: shardwise.Place, max_length: int = 100) -> Callable[..., str]:
    """GPT-2 on the rank's device; an item is a prompt. Its sample depends on its index alone, not on the rank."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).eval().to(place.device)

    def call(prompt: str, index: int) -> str:
        torch.manual_seed(index)
        inputs = tokenizer(prompt, return_tensors="pt").to(place.device)  # with its attention mask
        end = network.config.eos_token_id
        ids = network.generate(**inputs, do_sample=True, temperature=0.9, max_length=max_length, pad_token_id=end)
        return str(tokenizer.decode(ids[0], skip_special_tokens=True))

    return call


def main(model: str) -> None:
    """Print what became of each prompt."""
    inside = "RANK" in os.environ  # torchrun's processes are the ranks, and meet over a file
    where = {"output": "gpt2.jsonl", "overwrite": True} if inside else {"layout": "dp2"}
    for result in shardwise.map("data_parallel_gpt2:build", PROMPTS, settings={"model": model}, **where):
        print(result.index, repr(result.output) if result.error is None else result.error["message"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpt2")
