"""The `memplug` command."""
