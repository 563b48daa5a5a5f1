"""Views of traces and plans: a summary, a page, a picture, and files for memory_viz and Perfetto. Imports no torch."""
