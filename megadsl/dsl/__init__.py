"""What users write: kernels of mk.* ops, and schedules beside them."""
