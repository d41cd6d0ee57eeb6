"""One program per engine; each loads once, then answers JSON lines. They share the protocol and nothing else."""
