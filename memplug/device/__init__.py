"""The device that trains, and pinned memory of its host."""
