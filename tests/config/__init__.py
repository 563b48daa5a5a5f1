"""Tests of memplug's block, and of the names at the top of the package."""
