"""Checks to run before a job over several hosts.

    facts.py      the facts about one host
    probe.py      two processes started as ranks: do they start, what they see, how
                  fast they share; and how fast pairs of hosts exchange data
    checks.py     facts and measurements in, findings out
    diagnose.py   the hosts meet at a store of host 0, exchange what they found, and check it

A host alone needs no torch: processes of its own look at that. Several hosts meet at a store of
torch's kind. Every wait has a time limit: see :data:`diagnose.SECONDS`.
"""
