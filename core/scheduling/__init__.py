"""Which tokens are computed when, and who has which blocks. Control code: no torch."""
