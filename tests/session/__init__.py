"""Tests of one attached model."""
