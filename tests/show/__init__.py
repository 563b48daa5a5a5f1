"""Tests of pictures, pages and summaries."""
