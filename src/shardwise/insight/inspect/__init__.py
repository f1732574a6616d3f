"""The layout of a model over the ranks of a mesh: which rank holds what.

``read.py`` makes a report, of a running job or of one that has not been started. The report
(``report.py``) is a value made of those of ``grid.py``; ``text.py`` and ``page.py`` show it.
"""
