"""Writing quantised checkpoints: calibration, the layer-by-layer driver, the files."""
