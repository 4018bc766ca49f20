"""Thin handlers: read the body, call a service, hand back its answer."""
