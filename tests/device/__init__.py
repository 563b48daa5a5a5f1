"""Tests of the device that trains, and of its pinned host memory."""
