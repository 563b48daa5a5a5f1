"""The arena in C++, and the placement of its blocks."""
