"""The server against the offline engine: the same requests, streamed over HTTP and by `LLM`, by turns in one run.

    python -m bench.serve [--model smollm2] [--layout tp2] [--dtype bfloat16] [--batch 32] [--new 64] [--rounds 5]

Both are loaded all the time, each with ranks in processes of their own, and one works at a time. A turn lasts from the
first request to the last token, prompts included. The clients run in this process, on the same cores as the ranks:
one loop that looks at all connections every ten milliseconds and reads bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from bench.machine import machine
from shardwise import LLM, SamplingParams
from shardwise.verify import TEXT

LOOK = 0.01
"""Seconds between looks at what has come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    document = {"machine": machine(), **vars(args), **measure(args)}
    print(json.dumps(document) if args.json else "\n".join(f"{name}: {value}" for name, value in document.items()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second both ways, the ratio of the same round, and the cores that the front process takes."""
    words = TEXT.split()
    prompts = [" ".join(words[at : at + 24]) for at in range(args.batch)]
    by = SamplingParams(max_tokens=args.new, ignore_eos=True)
    options = ["--layout", args.layout, "--dtype", args.dtype]
    command = [sys.executable, "-m", "shardwise", "serve", "-m", args.model, "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    rates: dict[str, list[float]] = {"offline": [], "served": []}
    shares = []
    try:
        port = _port(server)
        front = psutil.Process(server.pid)
        with LLM(args.model, args.layout, dtype=args.dtype, isolate=True, prefix_cache=False) as llm:
            for number in range(args.rounds + 1):
                for way in ("offline", "served") if number % 2 else ("served", "offline"):
                    salted = [f"{number} {prompt}" for prompt in prompts]  # nothing is cached
                    cpu, started = sum(front.cpu_times()[:2]), time.monotonic()
                    if way == "offline":
                        llm.generate(salted, by)
                    else:
                        _serve(port, salted, args.new)
                    took = time.monotonic() - started
                    if number:  # the first round warms up
                        rates[way].append(args.batch * args.new / took)
                        if way == "served":
                            shares.append((sum(front.cpu_times()[:2]) - cpu) / took)
    finally:
        server.kill()
        server.wait()
    ratios = [served / offline for served, offline in zip(rates["served"], rates["offline"], strict=True)]
    return {
        "offline_tokens_per_s": round(statistics.median(rates["offline"]), 1),
        "served_tokens_per_s": round(statistics.median(rates["served"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "front_cores": round(statistics.median(shares), 3),
    }


def _port(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"ready at http://[^:]+:(\d+)", line)
        if found:
            return int(found[1])
    raise SystemExit("the server did not start")


def _serve(port: int, prompts: list[str], new: int) -> None:
    """Stream a completion of each prompt, all at once, as bytes."""
    answers = [bytearray() for _ in prompts]
    with selectors.DefaultSelector() as selector:
        for prompt, answer in zip(prompts, answers, strict=True):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(_message(prompt, new))
            selector.register(sock, selectors.EVENT_READ, answer)
        while selector.get_map():
            time.sleep(LOOK)  # else each event would wake this process, on a core that a rank wants
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                piece = key.fileobj.recv(65536)
                key.data.extend(piece)
                if not piece:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    for answer in answers:
        assert b" 200 " in answer[:20], bytes(answer[:300])
        assert answer.count(b"data: ") > 1, bytes(answer[-300:])
        assert b"[DONE]" in answer, bytes(answer[-300:])


def _message(prompt: str, new: int) -> bytes:
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


if __name__ == "__main__":
    main()
