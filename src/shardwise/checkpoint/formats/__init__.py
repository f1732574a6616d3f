"""Every format that can be read, as one thing, and how each is written."""
