"""Starting the ranks of a job, on one host or several, and ending them.

    command ──> launcher.py (the parent: starts, watches and stops the ranks of one host)
                    │  RANK, WORLD_SIZE, ... in the environment           (world.py)
                    ▼
                rank.py (each child: joins its world, runs, reports how it ended)

Over several hosts, ``rendezvous.py`` brings the launchers together, ``generation.py`` decides who
takes part and what follows when ranks end, and ``restarts.py`` runs one generation after another.

Nothing here imports torch before a rank connects, so that a launcher starts at once and stays
small.
"""
