"""Tests of addresses: planners, problems, and the planners' common code."""
