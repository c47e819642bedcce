"""The oracle: drives the real stack beside the float64 reference and says, in numbers, what differs."""
