"""One attached model: what users and hooks call, and what happens between two of its training steps."""
