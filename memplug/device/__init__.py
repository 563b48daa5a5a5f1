"""The device that trains, and the pinned memory of its host."""
