"""One attached model: the interface for users and hooks, and the actions between two training steps."""
