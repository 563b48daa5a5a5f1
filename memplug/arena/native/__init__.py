"""The native arena, and the C++ that places its blocks."""
