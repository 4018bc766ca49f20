"""Tool calls: what a request's tools mean, and the calls in an answer's text."""
