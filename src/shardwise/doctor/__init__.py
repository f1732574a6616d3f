"""Before a job over several hosts: what goes wrong, looked for one by one.

    table.py       the hosts come together, and each learns what all others say
    facts.py       what a host says of itself
    memory.py      ranks of one host hand each other memory, and measure
    exchange.py    pairs of hosts connect, and measure
    visit.py       all of it, in order
    every other    one kind of check: facts in, findings out

Nothing here imports torch, and nothing waits without a limit: see :data:`visit.SECONDS`.
"""
