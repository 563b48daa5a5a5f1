"""Addresses: planners, problems, and what planners share."""
