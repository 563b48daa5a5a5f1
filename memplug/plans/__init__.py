"""Plans, as data and as files."""
