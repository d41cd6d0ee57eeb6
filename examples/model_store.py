"""What the serving examples share: a server of a model store that lives as long as a ``with`` block.

python examples/model_store.py STORE    serves it for as long as you don't press Enter
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen


@contextmanager
def serving(store: Path) -> Iterator[tuple[str, str]]:
    """Serve all models of a store; yields where predictions are asked for, and where models are managed."""
    ports = ["--port", "0", "--management-port", "0"]  # free ones
    command = [sys.executable, "-m", "shardwise", "serve", "--model-store", str(store), *ports]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            manager, log = "", ""
            for line in server.stderr:
                log += line
                if found := re.search(r"models are managed at (\S+)", line):
                    manager = found[1]
                if found := re.search(r"ready at (\S+)", line):
                    threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
                    yield found[1], manager
                    return
            raise SystemExit(log)
        finally:
            server.terminate()


def ask(url: str, body: bytes, method: str = "POST") -> Iterator[str]:
    """Send a body; yields the answer in the pieces in which it comes."""
    request = Request(url, data=body or None, method=method)
    with urlopen(request, timeout=300) as answer:
        while piece := answer.read1():
            yield piece.decode()


if __name__ == "__main__":
    with serving(Path(sys.argv[1])) as (url, manager):
        input(f"predictions at {url}/predictions/…, models at {manager}/models; Enter ends it\n")
