"""When the steps of an engine begin: the loop that runs them, and the gate that each of them passes."""
