"""Who computes how many tokens next: pure Python, no torch."""
