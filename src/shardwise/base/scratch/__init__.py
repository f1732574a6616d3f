"""Files that vanish with their process, for what does not fit in memory.

file.py    a file without a name: space in it, direct reads and writes, and parts of it as memory
libc.py    the calls of Linux for both, and for memory that ranks share: which pages are read ahead,
           and which are let go
"""
