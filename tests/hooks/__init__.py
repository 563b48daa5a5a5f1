"""What attaching changes in frameworks and models."""
