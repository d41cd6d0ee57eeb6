"""A fleet on Ray Serve: one to three replicas, each a model on two ranks, with OpenAI's API in front of all.

python examples/ray_serve.py [MODEL] [LAYOUT] [PORT]
"""

import json
import sys
import urllib.request

import ray
from ray import serve

from shardwise.integrations.ray_serve import build_app


def ask(url: str, model: str, question: str) -> None:
    """Print an answer as it comes."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 40, "stream": True}
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print()


def main(model: str = "smollm2", layout: str = "tp2", port: str = "8000") -> None:
    """Start a cluster of this machine alone, and a fleet on it; ask it something; end both."""
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=2**27)  # a rank takes one of the six
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build_app(model, layout, max_replicas=3), name="llm")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    ask(f"http://127.0.0.1:{port}/v1/chat/completions", name, "Why is the sky blue?")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
