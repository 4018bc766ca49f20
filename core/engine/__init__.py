"""One engine: the step loop, what it runs on the device, and the process around it."""
