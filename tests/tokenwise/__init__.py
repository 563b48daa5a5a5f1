"""Tests of swapping and recomputing: decisions for regions."""
