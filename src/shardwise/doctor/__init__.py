"""Checks to run before a job over several hosts.

    group.py      the hosts connect to host 0 and exchange what each of them found
    facts.py      the facts about one host
    measure.py    how fast ranks of one host, and pairs of hosts, exchange data
    checks.py     facts and measurements in, findings out
    diagnose.py   all of the above in order

Nothing here imports torch, and every wait has a time limit: see :data:`diagnose.SECONDS`.
"""
