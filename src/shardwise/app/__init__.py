"""The command ``shardwise`` and all that only it needs: recipes, pages of runs, the doctor."""
