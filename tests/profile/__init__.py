"""Tests of the record of a step, and of what the machine can do."""
