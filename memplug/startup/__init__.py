"""What `memplug run` puts into each Python process of a command. No file here imports torch when a process starts."""
