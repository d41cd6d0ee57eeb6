"""A first compilation where it can do no harm: in a process with one second of CPU and little memory.

Some small grammars take llguidance minutes, or overflow its stack. This file is also the program of that process, which
imports nothing of this package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

CPU_SECONDS = 1.0
MEMORY = 256 * 2**20
"""Bytes beyond what the process has once it has started."""
STACK = 4 * 2**20
"""Half of what threads have in general, so that what fits here fits there."""
PATIENCE = 60.0
"""Seconds, for a machine that is too busy to give the process its second."""

TOO_LARGE = "it is too large or too intricate to compile within {} s and {} MB; simplify it"


def attempt(lark: str, limits: dict[str, Any]) -> None:
    """Compile a Lark grammar with a vocabulary of bytes. Raises ValueError if that fails or takes too much."""
    import llguidance

    site = str(Path(llguidance.__file__).parent.parent)
    program = [sys.executable, "-I", "-S", __file__, site]
    try:
        done = subprocess.run(program, input=json.dumps([lark, limits]).encode(), capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise ValueError("the machine is too busy to compile it; try again later") from None
    if done.returncode < 0 or b"MemoryError" in done.stderr:  # a signal: of the timer, of the stack's end or memory's
        raise ValueError(TOO_LARGE.format(round(CPU_SECONDS), MEMORY >> 20))
    if done.returncode > 0:
        raise RuntimeError(f"the trial of a grammar did not run: {done.stderr.decode(errors='replace')}")
    if done.stdout:
        from shardwise.grammar.matcher import sentence

        raise ValueError(sentence(done.stdout.decode(errors="replace")))


def _main() -> None:
    sys.path.append(sys.argv[1])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([value]) for value in range(256)), b"<end>")

        def __call__(self, text: str | bytes) -> list[int]:
            return []

    lark, limits = json.load(sys.stdin)
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    said: list[str] = []

    def run() -> None:
        matcher = LLMatcher(vocabulary, lark, log_level=0, limits=LLParserLimits(**limits))
        matcher.compute_bitmask()
        error = matcher.get_error()
        said.append("" if error.startswith("NoExtension") else error)  # the real vocabulary decides on that

    _limit()
    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    sys.stdout.write(said[0])


def _limit() -> None:
    import resource
    import signal

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere there is no telling what the process has
        data = int(statm.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))


if __name__ == "__main__":
    _main()
