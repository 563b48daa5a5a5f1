"""Tests of recordings of a step, their traces, and histories of torch's allocator."""
