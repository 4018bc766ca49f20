"""Writing quantised forms: the published algorithms, as functions on tensors."""
