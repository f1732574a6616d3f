"""Optimizer states outside of the memory that trains: read ahead of a step, written behind it.

place.py      "host" or "disk:FOLDER"
stores.py     the seam: what keeps bytes in a file, or on the host of an accelerator
entries.py    which tensors of a state are kept, and what they look like
states.py     how they come into staging memory and leave it
masters.py    copies of parameters in a wider dtype, which the optimizer updates instead
optimizer.py  the optimizer around another one
"""
