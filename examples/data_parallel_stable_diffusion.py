"""Stable Diffusion on two processes, each with the whole pipeline: one image file per prompt, named by its number.

python examples/data_parallel_stable_diffusion.py [MODEL [DIRECTORY]]
"""

import sys

import shardwise

FACTORY = "shardwise.factories:text_to_image"
PROMPTS = ["a dog", "a cat", "a lighthouse at night, oil on canvas"]


def main(model: str, folder: str) -> None:
    """Print where each image is. The same seed gives the same image on any layout."""
    settings = {"model": model, "out": folder, "seed": 7}
    with shardwise.map(FACTORY, PROMPTS, layout="dp2", settings=settings) as results:
        for prompt, result in zip(PROMPTS, results, strict=True):
            print(f"{prompt}: {result.output['image'] if result.error is None else result.error['message']}")


if __name__ == "__main__":
    model, folder, *_ = [*sys.argv[1:], *["CompVis/stable-diffusion-v1-4", "images"][len(sys.argv) - 1 :]]
    main(model, folder)
