"""SGLang reads published weights: its server is told to, by its own calls.

    update_weights_from_disk      a version in full in a folder
    update_weights_from_tensor    the tensors themselves, serialized

Source: ``sglang/srt/entrypoints/http_server.py`` and ``sglang/srt/managers/io_struct.py`` of
SGLang 0.5.23.
"""
