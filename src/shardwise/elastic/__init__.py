"""Starting the ranks of a job, on one host or several, and ending them.

    command ──> restarts.py ──> agent.py (on torch's elastic agent: starts, watches and stops ranks)
                                    │  RANK, WORLD_SIZE, ... in the environment        (world.py)
                                    ▼
                                rank.py (each child: runs, stops when asked, reports how it ended)

``rendezvous.py`` is where the hosts of a job meet, at the store of one of them (``store.py``), and
``membership.py`` has the rules: who takes part, and what follows when ranks end. ``program.py`` and
``call.py`` run a script or a function as ranks. Under ``torchrun`` and in workers of Ray the same
ranks run without an agent of ours (``connect.py``).

Nothing here imports torch before a job starts.
"""
