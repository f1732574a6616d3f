"""The folder of a run, read for people: what it says, as a value, a page and a local server."""
