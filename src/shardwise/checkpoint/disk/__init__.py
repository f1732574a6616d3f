"""The native format on disk: files, manifest, commit, and how tensors are read in pieces."""
