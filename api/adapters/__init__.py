"""What lies behind `/adapters`: registry, files and engine brought together."""
