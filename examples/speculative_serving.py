"""GPT-fast's example from a model folder: two ranks by tensor parallelism, drafts, and an answer in pieces.

python examples/speculative_serving.py [MODEL]
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from model_store import ask, serving

CONFIG = """
minWorkers: 1
maxWorkers: 1
maxBatchDelay: 200
responseTimeout: 300
deviceType: cpu
parallelType: tp
torchrun:
  nproc-per-node: 2
handler:
  converted_ckpt_dir: MODEL
  draft_checkpoint_path: MODEL,quantize=int4  # the model itself, with its weights rounded
  speculate_k: 4
  stream: true
  max_new_tokens: 50
"""


def main(model: str) -> None:
    """Serve a folder, and print what the model says as it says it."""
    with TemporaryDirectory() as store:
        folder = Path(store) / "gpt_fast"
        folder.mkdir()
        (folder / "model-config.yaml").write_text(CONFIG.replace("MODEL", model))
        with serving(Path(store)) as (url, _):
            body = json.dumps({"prompt": "The capital of France", "max_new_tokens": 24}).encode()
            pieces = 0
            for piece in ask(f"{url}/predictions/gpt_fast", body):
                print(piece, end="", flush=True)
                pieces += 1
            print(f"\n{pieces} pieces")
            figures = "".join(ask(f"{url}/metrics", b"", "GET"))
            for line in figures.splitlines():
                if line.startswith("shardwise_spec_decode"):  # how many drafts there were, and how many were right
                    print(line)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
