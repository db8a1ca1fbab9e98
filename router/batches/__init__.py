"""Files of clients, and batches of requests in them: stored in a folder, answered at the lowest priority."""
