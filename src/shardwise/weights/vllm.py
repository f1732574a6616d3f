"""vLLM and published weights: an engine that reads them, its trainer's side, and a source of them.

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="shardwise"))

Workers read what a trainer publishes, in memory of the host or from a folder: nothing is sent. The
backend is there wherever Shardwise is installed, for vLLM loads plugins by entry points, in every
worker. Without an engine of vLLM's, ``load_weights`` of its models takes a subscription as it is.

Source: ``vllm/distributed/weight_transfer/base.py``, 0.32.
"""

from __future__ import annotations
