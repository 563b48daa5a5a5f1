"""Tests of DeepSpeed's JSON: files, lines and keys."""
