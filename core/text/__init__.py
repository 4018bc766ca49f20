"""From text to tokens and back. Control code: no torch."""
