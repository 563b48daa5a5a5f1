"""Planners of addresses for all requests of a step: offline Dynamic Storage Allocation (MEMO, section 4.2)."""
