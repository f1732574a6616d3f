"""Local processes: how a command becomes several ranks, and how ranks end.

    command ──> launcher.py (the parent: starts, watches, stops)
                    │  RANK, WORLD_SIZE, ... in the environment
                    ▼
                rank.py (each child: finds its world, runs, reports how it ended)

Nothing here imports torch before a rank connects, so that a parent starts at once and stays
small.
"""
