"""DeepSpeed's JSON: reads the file, and translates former names of its keys into present ones."""
