"""Tests of the changes that attaching makes to frameworks and models."""
