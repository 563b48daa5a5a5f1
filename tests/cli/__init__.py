"""Tests of the `memplug` command."""
