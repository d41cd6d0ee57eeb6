"""One trial: ``python -m tests.reliability {faults,drains,overload,memory}``. Prints JSON; exits with 1 for a wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.drains import drain_often
from tests.reliability.faults import torment
from tests.reliability.memory import soak
from tests.reliability.overload import overload
from tests.tiny import save_text_model


async def run(asked: argparse.Namespace, model: str | Path) -> list[dict[str, Any]]:
    found = []
    for layout in asked.layouts.split(","):
        if asked.trial == "faults":
            report = await torment(model, layout, asked.kills, asked.stops, clients=asked.clients, seed=asked.seed)
            found.append(report.document())
        elif asked.trial == "drains":
            found.append(await drain_often(model, layout, asked.count, seed=asked.seed))
        elif asked.trial == "overload":
            found.append(await overload(model, layout, asked.seconds, longest=asked.longest, seed=asked.seed))
        else:
            found.append(await soak(model, layout, asked.count, seed=asked.seed))
        print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("trial", choices=["faults", "drains", "overload", "memory"])
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--layouts", default="tp2,pp2,tp2.pp2,dp2")
    parser.add_argument("--kills", type=int, default=25, help="SIGKILLs for each layout")
    parser.add_argument("--stops", type=int, default=5, help="SIGSTOPs for each layout")
    parser.add_argument("--count", type=int, default=100, help="drains, or requests, for each layout")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--longest", type=int, default=40, help="tokens of the longest answer under overload")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = asked.model or save_text_model(Path(directory))
        found = asyncio.run(run(asked, model))
    print(json.dumps(found))
    sys.exit(any(report["wrong"] for report in found))


if __name__ == "__main__":
    main()
