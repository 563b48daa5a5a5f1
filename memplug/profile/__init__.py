"""Traces of training steps, recorded by memplug or read from snapshots of torch's allocator."""
