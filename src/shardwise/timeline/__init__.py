"""What every rank did in a step, and when: recorded, and shown beside what a plan predicted."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazy_names

if TYPE_CHECKING:
    from shardwise.timeline.files import read, write
    from shardwise.timeline.merged import Timeline
    from shardwise.timeline.recording import Recording, record

__all__ = ["Recording", "Timeline", "read", "record", "write"]

_HOME = {
    "Recording": "shardwise.timeline.recording",
    "Timeline": "shardwise.timeline.merged",
    "read": "shardwise.timeline.files",
    "record": "shardwise.timeline.recording",
    "write": "shardwise.timeline.files",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
