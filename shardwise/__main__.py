"""``python -m shardwise`` is the command line."""

from shardwise.cli import main

main()
