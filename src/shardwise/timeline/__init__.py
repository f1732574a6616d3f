"""What every rank did in a step, and when: recorded, and shown beside what a plan predicted."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.timeline.recording import Recording, read, record, write
    from shardwise.timeline.steps import Timeline

__all__ = ["Recording", "Timeline", "read", "record", "write"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
