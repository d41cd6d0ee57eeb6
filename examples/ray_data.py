"""Offline inference over a data set on Ray: two actors, each with a model on two ranks; a bad row is only itself bad.

python examples/ray_data.py [MODEL] [LAYOUT]
"""

import sys

import ray

from shardwise.integrations.ray_data import generate_dataset

ROWS = [{"number": number, "prompt": f"The {word} lighthouse keeper"} for number, word in enumerate(["old", "new", ""])]


def main(model: str = "smollm2", layout: str = "tp2") -> None:
    """Print what became of each row."""
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=2**27)  # a rank takes one of the six
    rows = ray.data.from_items([*ROWS, {"number": 3, "prompt": None}])
    found = generate_dataset(rows, model, layout, sampling={"max_tokens": 24}, concurrency=2)
    for row in sorted(found.take_all(), key=lambda row: row["number"]):
        print(row["number"], repr(row["text"]) if row["error"] is None else f"error: {row['error']}")
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
