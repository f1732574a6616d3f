"""What a training is, as frozen configurations: each field with its default, help and checks.

The command line, files of options, plans and ranks are views of it. Nothing here imports torch, so
that a mistake is reported at once.
"""
