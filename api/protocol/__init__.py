"""What travels over HTTP: one msgspec struct for each request and each answer, strict about types."""
