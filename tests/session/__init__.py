"""One attached model."""
