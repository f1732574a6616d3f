"""The layout of a model over the ranks of a mesh: which rank holds what.

``api.py`` has the ways to make a report, and ``read.py`` reads the layouts. The report
(``report.py``) is a value made of those of ``grid.py``; ``text.py``, ``page.py`` and
``picture.py`` show it.
"""
