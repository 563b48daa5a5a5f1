"""Addresses for every request of a training step: offline Dynamic Storage Allocation (MEMO, section 4.2)."""
