"""Tests of the native core by itself."""
