"""Tests of the repository's own rules: lint, imports, READMEs, messages."""
