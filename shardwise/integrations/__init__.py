"""Doors into what others run: each hangs on the outside, and is imported only by who uses it."""
