"""Faults and loads against real server processes: each run counts what was lost, wrong or left behind."""
