"""The half of the connector beside the KV memory. Its threads digest, publish, read, verify and convert blocks."""
