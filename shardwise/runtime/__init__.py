"""Ranks: weights, KV cache and the processes that hold them."""
