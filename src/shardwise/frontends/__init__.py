"""APIs of other libraries on top of the runtime: FSDP1, PyTorch/XLA, strategies by name."""
