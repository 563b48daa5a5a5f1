"""The repository keeps its own rules: lint, imports, READMEs, messages."""
