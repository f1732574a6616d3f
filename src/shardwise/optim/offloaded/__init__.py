"""Optimizer states outside of the memory that trains: read ahead of a step, written behind it.

stores.py     the seam: what keeps bytes in a file, or on the host of an accelerator
states.py     which tensors are kept; how they come into staging memory and leave it
masters.py    copies of parameters in a wider dtype, which the optimizer updates instead
optimizer.py  the optimizer around another one
"""
