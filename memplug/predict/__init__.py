"""What a training would take, without a GPU."""
