"""One attached model: what users and hooks call, and what happens between two of its training steps."""

from memplug.session.session import Session, initial_regions

__all__ = ["Session", "initial_regions"]
