"""DeepSpeed's JSON: reads the file, and gives its keys the names that DeepSpeed has for them now."""
