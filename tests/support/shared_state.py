"""A Python module whose variable layers change."""

calls = 0
