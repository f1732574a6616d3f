"""The format on the disk: what a folder holds, how it gets its name, how it is read."""
