"""``python -m shardwise`` is the command ``shardwise``."""

from shardwise.app.cli.main import app

app()
