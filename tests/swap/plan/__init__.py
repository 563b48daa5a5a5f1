"""Tests of the swap list's planner."""
