"""What pictures and pages share: how things look, how numbers and captions are written, one time axis."""
