"""PiPPy's example from a model folder: two stages of a pipeline, several prompts at once, and another worker on demand.

python examples/pipeline_serving.py [MODEL]
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from model_store import ask, serving

CONFIG = """
minWorkers: 1
maxWorkers: 2
maxBatchDelay: 100
responseTimeout: 300
deviceType: cpu
parallelType: pp
torchrun:
  nproc-per-node: 2
pippy:
  rpc_timeout: 1800
  chunks: 1
handler:
  model_path: MODEL
  max_new_tokens: 24
"""
PROMPTS = ["The lighthouse keeper wrote:", "Once upon a time", "Dear diary,"]


def main(model: str) -> None:
    """Serve a folder; print each prompt with what follows it, and what the manager says of the model."""
    with TemporaryDirectory() as store:
        folder = Path(store) / "opt"
        folder.mkdir()
        (folder / "model-config.yaml").write_text(CONFIG.replace("MODEL", model))
        with serving(Path(store)) as (url, manager):
            body = json.dumps([{"prompt": prompt} for prompt in PROMPTS]).encode()
            for text in json.loads("".join(ask(f"{url}/predictions/opt", body))):
                print(repr(text))
            scaled = ask(f"{manager}/models/opt?min_worker=2&synchronous=true", b"", "PUT")
            print(json.loads("".join(scaled))["status"])
            (described,) = json.loads("".join(ask(f"{manager}/models/opt", b"", "GET")))
            for worker in described["workers"]:
                print(f"worker {worker['id']} is {worker['status']}, a process for each stage: {len(worker['pids'])}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
