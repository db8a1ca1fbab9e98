"""One module for each format: reads its fields of config.json, finds its layers, and computes their numbers."""
