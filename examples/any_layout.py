"""The same seeded request on several layouts: the same tokens every time.

python examples/any_layout.py [MODEL]
"""

import sys

from shardwise import LLM, SamplingParams


def main(model: str) -> None:
    """Print what each layout says."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
    answers = {}
    for layout in ("1", "tp2", "pp2"):
        with LLM(model, layout=layout) as llm:
            (output,) = llm.generate("The lighthouse keeper wrote:", params)
        answers[layout] = output.token_ids
        print(f"{layout:>4}  {output.text!r}")
    assert len({tuple(tokens) for tokens in answers.values()}) == 1


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
