"""HTTP itself: who gets through the front door, bodies read within limits, streams, errors, the OpenAPI document."""
