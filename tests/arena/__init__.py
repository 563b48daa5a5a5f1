"""What the planned arena serves, and when."""
