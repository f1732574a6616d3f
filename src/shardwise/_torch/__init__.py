"""Every private torch name that Shardwise uses, each behind one small function.

One file for each part of torch: ``dtensor``, ``autograd``, ``c10d`` and ``fsdp``. When a new torch
release moves a private name, these are the only files to change.
"""
