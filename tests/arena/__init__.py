"""Tests of the planned arena: which requests it serves, and when."""
