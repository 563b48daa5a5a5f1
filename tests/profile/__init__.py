"""The record of a step, and what the machine can do."""
