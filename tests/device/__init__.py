"""The device that trains, and its pinned host memory."""
