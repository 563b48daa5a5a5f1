"""Device to facts: what the machine can do."""
