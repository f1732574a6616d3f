"""Training over slow links: many inner steps on each replica, then one outer step for all.

From DiLoCo (Douillard et al., arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).
"""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.diloco.api import DiLoCo
    from shardwise.diloco.membership import Quorum
    from shardwise.diloco.quorum_server import QuorumServer
    from shardwise.diloco.settings import OuterSGD, Overlapped, Streaming, WireFormat

__all__ = [
    "DiLoCo",
    "OuterSGD",
    "Overlapped",
    "Quorum",
    "QuorumServer",
    "Streaming",
    "WireFormat",
]


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__)
