"""Files of clients, and the batches of requests in them: kept in a folder, answered behind every other request."""
