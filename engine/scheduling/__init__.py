"""What the scheduler decides with: requests, blocks, budgets, deadlines. Plain integers, no tensors."""
