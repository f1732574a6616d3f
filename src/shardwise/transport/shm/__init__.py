"""The transport for ranks of one host: shared memory in place of messages."""
