"""The scheduler's side of KV tiers: which content is in which slot, and the requests that wait for blocks of a tier."""
