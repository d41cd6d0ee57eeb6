"""Who owns what, and how partial results meet."""
