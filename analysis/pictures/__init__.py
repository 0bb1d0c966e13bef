"""Looks of pictures and pages: how things look, how numbers and captions are written, one time axis."""
