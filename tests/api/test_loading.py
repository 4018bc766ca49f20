"""What the operator is told once the base is loaded."""

from __future__ import annotations

from heddle.api.loading import report
from heddle.core.messages import Ready
from structlog.testing import capture_logs


def test_number_form_reason_and_every_note_are_in_the_log():
    ready = Ready(
        device="cpu",
        dtype="float32",
        quantization="none",
        quantization_reason="the checkpoint is in plain float",
        max_model_len=64,
        num_blocks=3,
        block_size=16,
        block_bytes=4096,
        weight_bytes=10,
        notes=["lm_head.weight differs from the tied embedding", "the pool was cut"],
    )
    with capture_logs() as logs:
        report(ready)
    (loaded,) = [line for line in logs if line["event"] == "base loaded"]
    assert (loaded["quantization"], loaded["reason"]) == ("none", "the checkpoint is in plain float")
    assert (loaded["weight_bytes"], loaded["pool_bytes"]) == (10, 3 * 4096)
    assert [line["note"] for line in logs if line["log_level"] == "warning"] == ready.notes
