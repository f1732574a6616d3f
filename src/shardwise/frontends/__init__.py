"""APIs of other libraries on top of the runtime: FSDP1, XLA, transformers, strategies by name."""
