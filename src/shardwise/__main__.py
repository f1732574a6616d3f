"""``python -m shardwise`` is the command ``shardwise``."""

from shardwise.cli.main import app

app()
