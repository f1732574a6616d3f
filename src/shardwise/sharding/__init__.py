"""The runtime: what is cut how, gathered when, reduced when."""
