"""A Python module with a variable that layers change."""

calls = 0
