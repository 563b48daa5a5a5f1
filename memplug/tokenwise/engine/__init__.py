"""The engine that runs regions: swapping, recomputation, and the streams that order them."""
