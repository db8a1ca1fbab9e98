"""The JSON body of a request: received within limits, inflated, decoded, and read field by field."""
