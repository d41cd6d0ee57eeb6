"""Measurements against other engines; run from the project's root as ``python -m bench.decode`` and the like."""
