"""Tests of the elements of figures: groups, colours, and runs of values along a clock."""
