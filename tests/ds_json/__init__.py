"""Of DeepSpeed's JSON: files, lines and keys."""
