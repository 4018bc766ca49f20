"""The load generator behind `heddle bench`: drives any OpenAI-style server and measures what its clients see.

It knows nothing of Heddle's own parts and imports none of them.
"""
